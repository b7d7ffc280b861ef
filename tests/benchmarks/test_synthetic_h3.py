"""The synthetic checkpoint: the architecture's tensors and no others, random everywhere, written in little memory."""

from __future__ import annotations

import json
import math
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import synthetic_h3
import torch
from load_once import HostMemory
from safetensors.torch import load_file
from synthetic_h3 import BLOCK, H3, TINY, write_synthetic_h3

from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.loader.architecture import ROPE, Architecture
from vllm_h3_quant.loader.checkpoint import Checkpoint, open_checkpoint
from vllm_h3_quant.loader.plan import plan_transformer

SMALL_BLOCK = 4093
MANY = replace(
    TINY, num_layers=6, hidden_size=1024, ffn_hidden_size=2048, time_embed_dim=1024, adaln_out_features=18 * 1024
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_synthetic_h3(tmp_path_factory.mktemp("model") / "h3", layers=2, architecture=TINY, block=SMALL_BLOCK)


@pytest.fixture
def checkpoint(root: Path) -> Checkpoint:
    return open_checkpoint(root / "FL2VA" / "transformer")


@pytest.fixture
def only_the_dit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the other components out: the tiny model's writer holds all of each."""

    def prepare(fresh: Path, *_: object) -> Path:
        folder = fresh / "FL2VA" / "transformer"
        folder.mkdir(parents=True)
        return folder

    monkeypatch.setattr(synthetic_h3, "_without_transformer", prepare)


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def tensors(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    return {name: tensor for file in checkpoint.files for name, tensor in load_file(file).items()}


def test_the_tensors_are_those_of_the_architecture(checkpoint: Checkpoint) -> None:
    expected = replace(TINY, num_layers=2).tensors()
    assert {name: (entry.shape, entry.dtype) for name, entry in checkpoint.entries.items()} == {
        name: (wanted.shape, "F32" if wanted.fp32 else "BF16")
        for name, wanted in expected.items()
        if not wanted.optional or name == ROPE
    }
    assert not checkpoint.duplicates
    architecture = Architecture.from_config(checkpoint.config, where="config.json")
    assert architecture == replace(TINY, num_layers=2)
    plan_transformer(checkpoint, architecture).check()


def test_a_file_is_a_block(checkpoint: Checkpoint) -> None:
    by_file: dict[str, set[str]] = {}
    for name, entry in checkpoint.entries.items():
        by_file.setdefault(entry.file.name, set()).add(name.partition("blocks.")[0] + name.partition("blocks.")[2][:2])
    assert len(by_file) == 2 + 2 + 1
    assert sum(len(blocks) == 1 for blocks in by_file.values()) == 4


def test_a_bias_comes_before_its_weight(checkpoint: Checkpoint) -> None:
    """As safetensors orders them, which is what a loader that waits for a layer's last tensor must live with."""
    order = list(checkpoint.entries)
    biases = [name for name in order if name.endswith(".bias")]
    assert len(biases) == 10
    for bias in biases:
        assert order.index(bias) < order.index(bias.removesuffix("bias") + "weight")


def test_numbers(checkpoint: Checkpoint) -> None:
    """Gains within five standard errors of a sample as large as the random block, of which each tensor is a part."""
    found = tensors(checkpoint)
    for name, tensor in found.items():
        assert tensor.isfinite().all(), name
        assert (tensor != 0).all(), name
        if name.endswith(".weight") and "norm" not in name and tensor.numel() >= SMALL_BLOCK:
            gain = tensor.double().std().item() * tensor.shape[-1] ** 0.5
            assert gain == pytest.approx(1, abs=5 / math.sqrt(2 * SMALL_BLOCK)), name
    # Two roundings of an exponent of at most 10 and one of the result, each of 2^-24, and pow itself.
    torch.testing.assert_close(found[ROPE], 10000.0 ** -(torch.arange(16) / 16), rtol=2**-19, atol=0)
    assert (found["blocks.0.norm1.weight"].float() - 1).abs().max() < 0.2


def test_no_two_rows_are_equal(checkpoint: Checkpoint) -> None:
    found = tensors(checkpoint)
    qkv = [found[f"blocks.{index}.attn.qkv_proj.weight"] for index in range(2)]
    rows = torch.cat(qkv).view(torch.int16)
    assert len(rows.unique(dim=0)) == len(rows)


def test_bytes_follow_from_the_seed(root: Path, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"layers": 2, "architecture": TINY, "block": SMALL_BLOCK}
    assert contents(write_synthetic_h3(tmp_path / "again", **arguments, threads=1)) == contents(root)
    other = contents(write_synthetic_h3(tmp_path / "other", **arguments, seed=1))
    same = {name for name, data in contents(root).items() if other[name] == data}
    assert not any(name.startswith("FL2VA/transformer/") and name.endswith(".safetensors") for name in same)


@pytest.mark.usefixtures("only_the_dit")
def test_memory_is_less_than_the_largest_tensor(tmp_path: Path) -> None:
    """A file of 64 MiB each for six blocks, 384 MiB in all, with a random block as small beside them as H3's is."""
    largest = 2 * max(math.prod(expected.shape) for expected in MANY.tensors().values())
    with HostMemory() as memory:
        write_synthetic_h3(tmp_path / "h3", architecture=MANY, block=2**20 - 3, threads=2)
    used = memory.peaks()["anonymous"]
    assert used is not None
    assert used < largest == 36 * 2**20


def test_scaled_blocks_of_the_full_size_are_less_than_its_largest_tensor() -> None:
    specs = [spec for specs in synthetic_h3._files(H3).values() for spec in specs]
    widths = {spec.shape[-1] for spec in specs if math.prod(spec.shape) >= BLOCK}
    assert (1 + len(widths)) * 2 * BLOCK < max(spec.nbytes for spec in specs)
    assert len(synthetic_h3._files(H3)) == 50 + 2 + 1
    # A block has 645.5 million numbers, a refiner's 385.4, and 182 MB are outside of both.
    assert sum(spec.nbytes for spec in specs) == pytest.approx(2 * (50 * 645.5e6 + 2 * 385.4e6) + 182e6, rel=0.001)


def test_a_model_is_kept_or_refused(root: Path, tmp_path: Path) -> None:
    before = root.stat().st_ino
    assert write_synthetic_h3(root, layers=2, architecture=TINY, block=SMALL_BLOCK) == root
    assert root.stat().st_ino == before
    with pytest.raises(
        H3QuantError, match=r"exists and is no synthetic model of these sizes.*give a path that is free"
    ):
        write_synthetic_h3(root, layers=3, architecture=TINY, block=SMALL_BLOCK)
    (tmp_path / "note").write_text("mine")
    with pytest.raises(H3QuantError, match="give a path that is free"):
        write_synthetic_h3(tmp_path, architecture=TINY)


def test_a_disk_without_room_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(free=64 * 2**30))
    with pytest.raises(H3QuantError, match=r"has 64.0 GiB left and the model of 55 layers takes 67.7; ask for fewer"):
        write_synthetic_h3(tmp_path / "h3", layers=55)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("only_the_dit")
def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(synthetic_h3.os, "pwrite", full)
    with pytest.raises(H3QuantError, match=r"safetensors: cannot be written: No space left on device; free the disk"):
        write_synthetic_h3(tmp_path / "h3", layers=1, architecture=TINY, block=SMALL_BLOCK)
    assert not list(tmp_path.iterdir())


def test_index_lists_every_tensor(root: Path, checkpoint: Checkpoint) -> None:
    index = json.loads(next((root / "FL2VA" / "transformer").glob("*.index.json")).read_text())
    assert index["weight_map"] == {name: entry.file.name for name, entry in checkpoint.entries.items()}
    assert index["metadata"]["total_size"] == checkpoint.nbytes
