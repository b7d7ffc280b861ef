"""The bytes of an exported file: linears quantized one at a time, a piece of rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.export.plan import LinearFile, Shard
from vllm_h3_quant.kernels.quantize import largest_scale, quantize_rows
from vllm_h3_quant.loader.reader import mapped
from vllm_h3_quant.loader.shards import Written, shard_writer

PIECE = 2**24
"""Elements of the rows that are quantized and written together: rows are independent, so this moves no byte."""

_NAN = 0x7F
"""e4m3's code of NaN, without the sign."""


def write_shard(shard: Shard, file: Path, device: torch.device, wrote: Callable[[int], None]) -> Written:
    """Write ``shard`` as ``file``.

    Args:
        shard: what it holds.
        file: where it will be.
        device: where weights are quantized.
        wrote: called with the number of bytes after each piece.

    Raises:
        H3QuantError: weights that are not finite, a source that cannot be read, or a disk that is full.
    """
    scales: dict[str, torch.Tensor] = {}
    coded = {linear.scale.name: linear for linear in shard.linears.values() if linear.fmt}

    def pieces(name: str) -> Iterator[torch.Tensor]:
        if name in shard.plain:
            yield mapped(shard.plain[name])
        elif name in coded:
            if name not in scales:  # its codes come later, because their size keeps nothing behind them aligned
                scales[name] = torch.cat([scale for _, scale in codes(coded[name], device)])
            yield scales.pop(name)
        elif shard.linears[name].fmt is None:
            yield from _values(shard.linears[name])
        else:
            linear, found = shard.linears[name], []
            for piece, scale in codes(linear, device):
                found.append(scale)
                yield piece
            scales[linear.scale.name] = torch.cat(found)

    with shard_writer(file, shard.specs, shard.metadata) as writer:
        for spec in shard.specs:
            writer.write(spec.name, _counted(pieces(spec.name), wrote))
    return writer.written()


def codes(linear: LinearFile, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """``(rows, K)`` codes and ``(rows, 1)`` fp32 scales on the host, from the first row to the last.

    They are those that a linear method makes of the weight when it is loaded whole.

    Raises:
        H3QuantError: the weights of a row are not finite.
    """
    assert linear.fmt is not None
    if linear.ready:
        for first, count in _rows(linear):
            found = linear.stored.codes(first, count)
            if linear.fmt.dtype.is_floating_point:
                _refuse((found.view(torch.uint8) & _NAN == _NAN).any(1), linear, first)
            yield found, linear.stored.row_scale(first, count)
        return
    weight = torch.empty(linear.stored.shape, dtype=torch.bfloat16, device=device)
    linear.stored.fill(weight, 0)
    for first, count in _rows(linear):
        found, scale = quantize_rows(weight[first : first + count], linear.fmt, rotation=linear.rotation)
        _refuse(~(scale < largest_scale(linear.fmt, linear.rotation)).flatten(), linear, first)
        yield found.cpu(), scale.cpu()


def _values(linear: LinearFile) -> Iterator[torch.Tensor]:
    for first, count in _rows(linear):
        yield linear.stored.values(first, count, linear.stored.value_dtype)


def _rows(linear: LinearFile) -> Iterator[tuple[int, int]]:
    rows, columns = linear.stored.shape
    step = max(PIECE // max(columns, 1), 1)
    for first in range(0, rows, step):
        yield first, min(step, rows - first)


def _refuse(broken: torch.Tensor, linear: LinearFile, first: int) -> None:
    if broken.any():
        row, entry = first + int(broken.nonzero()[0, 0]), linear.stored.entries[0]
        raise H3QuantError(
            f"{entry.file}: tensor {entry.name!r}: the weights of output {row} of {linear.stored.name} are not finite;"
            " copy the checkpoint again"
        )


def _counted(pieces: Iterator[torch.Tensor], wrote: Callable[[int], None]) -> Iterator[torch.Tensor]:
    for piece in pieces:
        yield piece
        wrote(piece.nbytes)
