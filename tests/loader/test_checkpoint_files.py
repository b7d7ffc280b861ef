"""Which files make up a component, and whether they hold what the index says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.loader import reader
from vllm_h3_quant.loader.checkpoint import open_checkpoint, read_json
from vllm_h3_quant.loader.reader import mapped

NAME = "blocks.0.mlp.fc2.weight"
INDEX = "diffusion_pytorch_model.safetensors.index.json"


def test_a_folder_with_an_index(format_folder: Callable[[str], Path]) -> None:
    folder = format_folder("native")
    found = open_checkpoint(folder)
    expected = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert found.entries.keys() == expected.keys()
    assert found.nbytes == sum(tensor.nbytes for tensor in expected.values())
    assert set(found.files) == set(folder.glob("*.safetensors"))
    assert found.config == json.loads((folder / "config.json").read_text())
    assert not found.duplicates
    for name, entry in found.entries.items():
        assert torch.equal(mapped(entry), expected[name]), name


def test_a_single_file_takes_the_config_beside_it(format_folder: Callable[[str], Path]) -> None:
    (file,) = format_folder("comfy_fp8").glob("*.safetensors")
    assert open_checkpoint(file).config["hidden_size"] == 192
    assert open_checkpoint(file).entries == open_checkpoint(file.parent).entries


def test_only_files_of_the_index_belong(own_folder: Callable[[str], Any]) -> None:
    """As for the engine, a file beside them is none of the component's."""
    folder = own_folder("native")
    save_file({"stray": torch.zeros(1)}, folder.path / "stray.safetensors")
    assert "stray" not in open_checkpoint(folder.path).entries
    (folder.path / INDEX).unlink()
    assert "stray" in open_checkpoint(folder.path).entries


def test_missing_shard_is_named_with_a_tensor(own_folder: Callable[[str], Any]) -> None:
    folder = own_folder("native")
    file = folder.file_of(NAME)
    first = sorted(load_file(file))[0]
    file.unlink()
    with pytest.raises(
        H3QuantError, match=rf"{file.name} is missing: .* tensors in it, '{first}' first; copy the file"
    ):
        open_checkpoint(folder.path)


def test_tensor_in_another_file_than_the_index_says(own_folder: Callable[[str], Any]) -> None:
    folder = own_folder("native")
    here = folder.file_of(NAME).name
    index = folder.path / INDEX
    content = json.loads(index.read_text())
    other = next(file for file in content["weight_map"].values() if file != here)
    content["weight_map"][NAME] = other
    index.write_text(json.dumps(content))
    with pytest.raises(H3QuantError, match=rf"places tensor '{NAME}' in {other}, but it is in {here}"):
        open_checkpoint(folder.path)
    content["weight_map"] |= {NAME: here, "nowhere": here}
    index.write_text(json.dumps(content))
    with pytest.raises(H3QuantError, match=rf"places tensor 'nowhere' in {here}, but it is in no file"):
        open_checkpoint(folder.path)


def test_duplicate_is_a_problem_that_names_it(own_folder: Callable[[str], Any]) -> None:
    folder = own_folder("native")
    other = next(file for file in folder.path.glob("*.safetensors") if file != folder.file_of(NAME))
    tensors = load_file(other)
    other.unlink()
    save_file(tensors | {NAME: torch.zeros(192, 128, dtype=torch.bfloat16)}, other)
    assert open_checkpoint(folder.path).duplicates == (NAME,)
    (problem,) = folder.plan().problems
    assert f"tensor {NAME!r} is in more than one file; keep one" in problem


def test_first_value_of_metadata_counts(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({name: torch.zeros(1)}, tmp_path / f"{name}.safetensors", metadata={"who": name, name: "own"})
    assert open_checkpoint(tmp_path).metadata == {"who": "a", "a": "own", "b": "own"}


INDEXES = {
    "no JSON": "{",
    "no mapping": [],
    "no weight_map": {},
    "empty weight_map": {"weight_map": {}},
    "weight_map of a list": {"weight_map": []},
    "file of a number": {"weight_map": {NAME: 3}},
    "path": {"weight_map": {NAME: "../elsewhere.safetensors"}},
    "empty name": {"weight_map": {NAME: ""}},
    "NUL": {"weight_map": {NAME: "a\0b"}},
    "newline": {"weight_map": {NAME: "a\nb"}},
    "surrogate": {"weight_map": {NAME: "\ud800"}},
    "300 characters": {"weight_map": {NAME: "a" * 300}},
}


@pytest.mark.parametrize("case", INDEXES)
def test_refuses_an_index(case: str, tmp_path: Path) -> None:
    content = INDEXES[case]
    (tmp_path / INDEX).write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(H3QuantError) as caught:
        open_checkpoint(tmp_path)
    told = str(caught.value)
    assert INDEX in told
    assert told.isprintable()


def test_refuses_two_indexes_none_and_nothing(tmp_path: Path) -> None:
    with pytest.raises(H3QuantError, match="holds no safetensors file"):
        open_checkpoint(tmp_path)
    with pytest.raises(H3QuantError, match="neither a folder nor a file"):
        open_checkpoint(tmp_path / "absent")
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors.index.json").write_text("{}")
    with pytest.raises(H3QuantError, match=r"2 indexes \(a\.safetensors\.index\.json, b"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["[1]", "{", "\xff", "[" * 100_000])
def test_refuses_a_config_that_is_no_mapping(text: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(H3QuantError, match=r"config\.json: (is no JSON|holds list, not a mapping)") as caught:
        read_json(file)
    assert "\n" not in str(caught.value)


class Casting:
    """A streamer that turns codes into values on the way."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def get_tensor(self, name: str) -> torch.Tensor:
        return self.tensor


@pytest.mark.parametrize(
    ("arrives", "told"),
    [
        (torch.zeros(192, 128, dtype=torch.bfloat16), r"arrives as bfloat16 \[192, 128\].*states float8_e4m3fn"),
        (torch.zeros(128, 192, dtype=torch.float8_e4m3fn), r"arrives as float8_e4m3fn \[128, 192\]"),
    ],
    ids=["cast", "turned"],
)
def test_refuses_a_reader_that_changes_tensors(
    arrives: torch.Tensor, told: str, format_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = open_checkpoint(format_folder("comfy_fp8")).entries
    entry = next(entry for name, entry in entries.items() if name.endswith(NAME))
    monkeypatch.setattr(reader, "_open", lambda file, *stat: Casting(arrives))
    with pytest.raises(H3QuantError, match=rf"tensor '{entry.name}' {told}.*; load the file without the streamer"):
        mapped(entry)
