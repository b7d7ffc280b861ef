"""Files written from front to back: readable by everyone, aligned, and there as a whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.loader.durable import durable
from vllm_h3_quant.loader.header import DTYPES, read_header
from vllm_h3_quant.loader.reader import digest, mapped
from vllm_h3_quant.loader.shards import ALIGNMENT, PAGE, TensorSpec, Written, in_order, shard_writer

Tensors = dict[str, torch.Tensor]


def specs_of(tensors: Tensors, *first: str) -> tuple[TensorSpec, ...]:
    return in_order((TensorSpec(name, value.dtype, tuple(value.shape)) for name, value in tensors.items()), first)


def write(file: Path, tensors: Tensors, *first: str) -> Written:
    """Every tensor in two pieces where it has more than one row."""
    with shard_writer(file, specs_of(tensors, *first), {"format": "test"}) as writer:
        for spec in writer.specs:
            value = tensors[spec.name]
            half = value.shape[0] // 2 if value.ndim else 0
            writer.write(spec.name, [value[:half], value[half:]] if half else [value])
    return writer.written()


def raw(value: torch.Tensor) -> bytes:
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.fixture
def tensors() -> Tensors:
    """One of each dtype with an odd number of elements, a scalar, nothing, and rows that are not contiguous."""
    found = {name: torch.arange(15).reshape(5, 3).to(dtype) for name, dtype in DTYPES.items()}
    wide = torch.arange(64 * 256).reshape(256, 64)
    return found | {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "turned": wide.t().to(torch.int8)}


def test_the_library_reads_what_was_written(tmp_path: Path, tensors: Tensors) -> None:
    file = tmp_path / "all.safetensors"
    write(file, tensors, "turned")
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "test"}
        assert set(opened.keys()) == tensors.keys()
        for name, value in tensors.items():
            found = opened.get_tensor(name)
            assert (found.dtype, found.shape, raw(found)) == (value.dtype, value.shape, raw(value)), name
    assert read_header(file).entries.keys() == tensors.keys()


def test_digests_are_those_of_the_file(tmp_path: Path, tensors: Tensors) -> None:
    file = tmp_path / "all.safetensors"
    written = write(file, tensors, "turned")
    content = file.read_bytes()
    assert (written.nbytes, written.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    assert written.tensors == {name: digest(entry) for name, entry in read_header(file).entries.items()}


def test_a_mapped_weight_is_an_operand_without_a_copy(tmp_path: Path, tensors: Tensors) -> None:
    """Its transposed view lies in the file's own mapping and begins at a multiple of 128 bytes."""
    file = tmp_path / "all.safetensors"
    weights = {f"w{index}": torch.full((96, 32), index, dtype=torch.int8) for index in range(3)}
    scales = {f"s{index}": torch.rand(7, 1) for index in range(3)}
    write(file, {**scales, **tensors, **weights}, *weights)
    entries = read_header(file).entries
    assert [entries[name].start for name in weights] == [PAGE + 96 * 32 * index for index in range(3)]
    weight = mapped(entries["w1"])
    assert _file_behind(weight) == str(file)
    view = weight.t()
    assert (tuple(view.shape), view.stride()) == ((32, 96), (1, 32))
    assert view.data_ptr() % ALIGNMENT == 0


def _file_behind(tensor: torch.Tensor) -> str:
    """The file that is mapped where ``tensor`` lies."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(bound, 16) for bound in line.split()[0].split("-"))
        if low <= tensor.data_ptr() < high:
            return line.split()[-1]
    return ""


@pytest.mark.parametrize("odd", [(5, 7), (3, 128), (127, 1), (1, 1)])
def test_a_weight_of_odd_size_leaves_the_others_aligned(tmp_path: Path, odd: tuple[int, int]) -> None:
    tensors = {
        "odd": torch.zeros(odd, dtype=torch.int8),
        "scale": torch.zeros(odd[0], 1),
        "even": torch.zeros(64, 2, dtype=torch.int8),
        "bias": torch.zeros(odd[0], dtype=torch.bfloat16),
    }
    file = tmp_path / "odd.safetensors"
    write(file, tensors, "odd", "even")
    entries = read_header(file).entries
    assert entries["even"].start % ALIGNMENT == 0
    assert all(entry.start % entry.torch_dtype.itemsize == 0 for entry in entries.values())


TWO = (TensorSpec("a", torch.int8, (4,)), TensorSpec("b", torch.int8, (4,)))
FOUR = torch.zeros(4, dtype=torch.int8)


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ([("b", FOUR)], "'b' is written where 'a' is due"),
        ([("a", FOUR), ("b", FOUR), ("a", FOUR)], "where 'nothing' is due"),
        ([("a", FOUR.float())], "not 16 of torch.float32"),
        ([("a", FOUR.view(torch.uint8))], "of torch.int8, not 4 of torch.uint8"),
        ([("a", FOUR.repeat(2))], "takes 4 more bytes"),
        ([("a", FOUR[:3])], "'a' lacks 1 bytes"),
        ([("a", FOUR)], "'b' was never written"),
    ],
)
def test_what_does_not_fit_the_header_leaves_no_file(
    tmp_path: Path, calls: list[tuple[str, torch.Tensor]], message: str
) -> None:
    def write_all() -> None:
        with shard_writer(tmp_path / "x", TWO, {}) as writer:
            for name, value in calls:
                writer.write(name, [value])

    with pytest.raises(ValueError, match=message):
        write_all()
    assert list(tmp_path.iterdir()) == []


def test_a_file_has_no_name_before_all_of_it_is_written(tmp_path: Path) -> None:
    with shard_writer(tmp_path / "x", TWO, {}) as writer:
        writer.write("a", [FOUR])
        writer.write("b", [FOUR])
        assert [file.name for file in tmp_path.iterdir()] == ["x.tmp"]
    assert [file.name for file in tmp_path.iterdir()] == ["x"]


def test_a_full_disk_is_one_line_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "x").write_text("before")
    monkeypatch.setattr(os, "fsync", full)
    message = rf"^{tmp_path}/x: No space left on device[^\n]*$"
    with pytest.raises(H3QuantError, match=message), durable(tmp_path / "x") as stream:
        stream.write(b"after")
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"x": "before"}
