"""The manifest of an exported model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.loader.manifest import MANIFEST, digests_of, read_manifest, root_of, write_manifest
from vllm_h3_quant.loader.shards import Written

SHARD = "FL2VA/transformer/model-00001-of-00001.safetensors"
DIGESTS = {"blocks.0.mlp.fc1.weight": "a" * 64, "blocks.0.mlp.fc1.weight_scale": "b" * 64}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with a manifest, and files that it lists."""
    found = tmp_path / "model"
    for name in (SHARD, "model_index.json"):
        (found / name).parent.mkdir(parents=True, exist_ok=True)
        (found / name).write_bytes(b"")
    write_manifest(found, {SHARD: Written(10, "c" * 64, DIGESTS), "model_index.json": Written(2, "d" * 64, {})})
    return found


def test_holds_what_was_written(root: Path) -> None:
    manifest = read_manifest(root)
    assert manifest.files == {
        SHARD: {"bytes": 10, "sha256": "c" * 64},
        "model_index.json": {"bytes": 2, "sha256": "d" * 64},
    }
    assert manifest.tensors == {SHARD: DIGESTS}
    content = json.loads((root / MANIFEST).read_text())
    assert (content["format"], content["version"]) == ("vllm-h3-quant", "1")


def test_digests_of_a_shard_however_it_is_named(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path from the working folder, a link to the model, and a model whose files are links, as the Hub's are."""
    assert digests_of(root, root / SHARD) == DIGESTS
    (tmp_path / "link").symlink_to(root)
    assert digests_of(root, tmp_path / "link" / SHARD) == DIGESTS
    monkeypatch.chdir(root.parent)
    assert digests_of(Path("model"), Path("model") / SHARD) == DIGESTS
    blob = tmp_path / "blobs" / "1234"
    blob.parent.mkdir()
    (root / SHARD).rename(blob)
    (root / SHARD).symlink_to(blob)
    assert root_of(root / SHARD) == root
    assert digests_of(root, root / SHARD) == DIGESTS


def test_a_manifest_that_changed_is_read_again(root: Path) -> None:
    digests_of(root, root / SHARD)
    changed = {"w": "e" * 64}
    write_manifest(root, {SHARD: Written(10, "c" * 64, changed)})
    os.utime(root / MANIFEST, ns=(1, 1))  # a clock may be too coarse to tell the two apart
    assert digests_of(root, root / SHARD) == changed


def test_a_model_without_one(tmp_path: Path) -> None:
    with pytest.raises(H3QuantError, match=r"no manifest\.json lies above it"):
        root_of(tmp_path / SHARD)
    with pytest.raises(H3QuantError, match=rf"^{tmp_path}/manifest.json: cannot be read: No such file"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("name", ["model_index.json", "FL2VA/transformer/other.safetensors", "../elsewhere"])
def test_a_file_without_tensors_in_it(root: Path, name: str) -> None:
    with pytest.raises(H3QuantError, match=f"{Path(name).name}: .*manifest.json lists no tensors of this file"):
        digests_of(root, root / name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "has the format 'other'"),
        ({"version": "2"}, "version '2'"),
        ({"files": []}, "does not map files"),
        ({"tensors": None}, "does not map files"),
        ({"tensors": {SHARD: {"w": 5}}}, "does not map files"),
        ({"tensors": {SHARD: {"w": "abc"}}}, "does not map files"),
    ],
)
def test_damaged(root: Path, change: dict[str, Any], message: str) -> None:
    file = root / MANIFEST
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(H3QuantError, match=message) as error:
        digests_of(root, root / SHARD)
    assert str(error.value).startswith(str(file))
