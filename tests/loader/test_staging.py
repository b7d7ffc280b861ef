"""Rows read by threads into buffers: every one, in order, and none overwritten while it is in use."""

from __future__ import annotations

import errno
import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file

from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.loader import staging
from vllm_h3_quant.loader.header import Entry, read_header

COLUMNS = 24


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Buffers of ten rows of bf16."""
    staging.release()
    monkeypatch.setattr(staging, "CHUNK", 10 * COLUMNS * 2)
    yield
    staging.release()


def stored(folder: Path, rows: int) -> tuple[Entry, torch.Tensor]:
    values = torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    save_file({"before": torch.zeros(3), "weight": values}, str(folder / "file.safetensors"))
    return read_header(folder / "file.safetensors").entries["weight"], values


@pytest.mark.parametrize("rows", [1, 9, 10, 11, 20, 21, 30, 31, 40, 57])
@pytest.mark.parametrize("first", [0, 7])
def test_every_row_arrives_once(tmp_path: Path, rows: int, first: int) -> None:
    """From one piece to more than there are buffers."""
    entry, values = stored(tmp_path, first + rows + 2)
    found, at = [], first
    for row, piece in staging.stage().rows(entry, first, rows):
        assert row == at
        at += piece.shape[0]
        found.append(piece.clone())
    assert torch.equal(torch.cat(found), values[first : first + rows])


def test_a_piece_stays_until_the_next_is_asked_for(tmp_path: Path) -> None:
    entry, values = stored(tmp_path, 100)
    for row, piece in staging.stage().rows(entry, 0, 100):
        time.sleep(0.01)  # reads of the next pieces go on
        assert torch.equal(piece, values[row : row + piece.shape[0]])


def test_reading_can_be_given_up(tmp_path: Path) -> None:
    """As when a copy fails: the next tensor starts with free buffers and reads the right bytes."""
    entry, values = stored(tmp_path, 100)
    rows = staging.stage().rows(entry, 0, 100)
    next(rows)
    rows.close()
    assert torch.equal(torch.cat([piece.clone() for _, piece in staging.stage().rows(entry, 50, 50)]), values[50:])


def test_a_file_that_was_cut_after_its_header_was_read(tmp_path: Path) -> None:
    entry, _ = stored(tmp_path, 40)
    with entry.file.open("r+b") as file:
        file.truncate(entry.start + 15 * entry.row_nbytes)
    with pytest.raises(H3QuantError, match="truncated in tensor 'weight'"):
        list(staging.stage().rows(entry, 0, 40))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Position and bytes of what is read from files, as it is read."""
    found: list[tuple[int, int]] = []
    pread = os.preadv

    def noted(descriptor: int, buffers: list[memoryview], position: int) -> int:
        got = pread(descriptor, buffers, position)
        found.append((position, got))
        return got

    monkeypatch.setattr(os, "preadv", noted)
    return found


TENSORS = {
    "a": torch.arange(57 * 24, dtype=torch.int16).reshape(57, 24),
    "b": torch.arange(3, dtype=torch.uint8),
    "c": torch.arange(40 * 12, dtype=torch.int32).reshape(40, 12),
    "d": torch.arange(13 * 48, dtype=torch.int16).to(torch.uint8).reshape(13, 48),
    "e": torch.arange(5 * 24, dtype=torch.int16).reshape(5, 24),
    "f": torch.arange(31 * 7, dtype=torch.int16).reshape(31, 7),
}


def file_of(folder: Path, order: str = "abcdef") -> dict[str, Entry]:
    """Tensors one behind the other in an order that safetensors itself would not write: some at odd positions."""
    header, at = {}, 0
    for name in order:
        tensor = TENSORS[name]
        kind = {torch.int16: "I16", torch.uint8: "U8", torch.int32: "I32"}[tensor.dtype]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(header).encode()
    body = b"".join(TENSORS[name].numpy().tobytes() for name in order)
    (folder / "file.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + body)
    return dict(read_header(folder / "file.safetensors").entries)


def read(entry: Entry, first: int, count: int) -> torch.Tensor:
    return torch.cat([piece.clone() for _, piece in staging.stage().rows(entry, first, count)])


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_asked_for_next(tmp_path: Path, seed: int) -> None:
    """Rows that follow, that come again, that lie before, in another tensor, or in a tensor at an odd position."""
    rng = random.Random(seed)
    entries = file_of(tmp_path, "".join(rng.sample("abcdef", 6)))
    name, at = "a", 0
    for _ in range(60):
        if rng.random() < 0.5 or at == TENSORS[name].shape[0]:
            name, at = rng.choice("abcdef"), 0
        first = at if rng.random() < 0.7 else rng.randrange(TENSORS[name].shape[0])
        count = rng.randint(1, TENSORS[name].shape[0] - first)
        assert torch.equal(read(entries[name], first, count), TENSORS[name][first : first + count])
        at = first + count


def test_reading_goes_on_behind_the_last_row(tmp_path: Path, reads: list[tuple[int, int]]) -> None:
    """The next tensor's first rows are read while this one's are still in use."""
    entries = file_of(tmp_path)
    *_, (_, last) = staging.stage().rows(entries["a"], 0, 57)
    staging.stage().close()
    assert max(position + nbytes for position, nbytes in reads) >= entries["c"].start + entries["c"].row_nbytes
    assert torch.equal(last, TENSORS["a"][-last.shape[0] :])


def test_nothing_is_read_twice_but_rows_that_were_cut(tmp_path: Path, reads: list[tuple[int, int]]) -> None:
    entries = file_of(tmp_path, "acdefb")
    for name, entry in entries.items():
        read(entry, 0, TENSORS[name].shape[0])
    cut = sum(entry.row_nbytes for entry in entries.values())
    assert sum(nbytes for _, nbytes in reads) <= sum(entry.nbytes for entry in entries.values()) + cut


def test_a_file_that_was_written_again(tmp_path: Path) -> None:
    entries = file_of(tmp_path)
    read(entries["a"], 0, 10)
    changed = TENSORS["a"] + 1
    raw = bytearray(entries["a"].file.read_bytes())
    raw[entries["a"].start : entries["a"].start + changed.nbytes] = changed.numpy().tobytes()
    time.sleep(0.02)  # the clock of files ticks
    entries["a"].file.write_bytes(raw)
    assert torch.equal(read(entries["a"], 10, 10), changed[10:20])


def test_files_are_closed(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    entries = file_of(tmp_path)
    for name in "acda":
        read(entries[name], 0, 2)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    staging.release()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    entries = file_of(tmp_path)
    entries["a"].file.unlink()
    with pytest.raises(H3QuantError, match=r"file\.safetensors: cannot be read \(No such file"):
        read(entries["a"], 0, 1)


def test_a_disk_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    entries = file_of(tmp_path)
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(H3QuantError, match=r"tensor 'a' cannot be read \(Input/output error\)"):
        read(entries["a"], 0, 1)


def test_a_system_on_which_cuda_registers_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model loads there all the same, out of memory that CUDA allocates."""
    asked = []

    def refuse(nbytes: int, *, pinned: bool) -> torch.Tensor:
        assert pinned
        raise H3QuantError("cannot be pinned")

    def empty(nbytes: int, *, pin_memory: bool, **more: Any) -> torch.Tensor:
        asked.append(pin_memory)
        return torch.zeros(nbytes, **more)

    entry, values = stored(tmp_path, 57)
    monkeypatch.setattr(staging.pages, "can_pin", lambda: True)
    monkeypatch.setattr(staging.pages, "allocate", refuse)
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "Event", Mock)
    assert torch.equal(read(entry, 0, 57), values[:57])
    assert asked == [True] * staging.BUFFERS


def test_a_row_that_fits_no_buffer(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(2, 5000)}, str(tmp_path / "wide.safetensors"))
    entry = read_header(tmp_path / "wide.safetensors").entries["weight"]
    with pytest.raises(H3QuantError, match="a row of tensor 'weight' has 20000 bytes"):
        list(staging.stage().rows(entry, 0, 2))
