"""Rows read by threads into buffers: every one, in order, and none overwritten while it is in use."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

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


def test_a_row_that_fits_no_buffer(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(2, 5000)}, str(tmp_path / "wide.safetensors"))
    entry = read_header(tmp_path / "wide.safetensors").entries["weight"]
    with pytest.raises(H3QuantError, match="a row of tensor 'weight' has 20000 bytes"):
        list(staging.stage().rows(entry, 0, 2))
