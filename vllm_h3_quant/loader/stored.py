"""A linear's weight as a checkpoint holds it, read in the order of rows that the model keeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from itertools import groupby

import torch

from vllm_h3_quant.kernels.formats import CodeFormat
from vllm_h3_quant.loader.coding import Coding, Scaled, Values
from vllm_h3_quant.loader.header import Entry
from vllm_h3_quant.loader.reader import mapped
from vllm_h3_quant.loader.staging import CHUNK, stage


@dataclass(frozen=True)
class Segment:
    """Neighbouring rows of one tensor of a file.

    Attributes:
        entry: the tensor.
        coding: how its numbers are coded.
        file_row: the first row.
        rows: how many.
    """

    entry: Entry
    coding: Coding
    file_row: int
    rows: int


@dataclass(frozen=True)
class StoredLinear:
    """The weight of one linear.

    Attributes:
        name: the model's module.
        shape: outputs and inputs.
        segments: its rows in the model's order.
        parts: for each part that is a tensor of its own, first row and number of rows.
    """

    name: str
    shape: tuple[int, int]
    segments: tuple[Segment, ...]
    parts: Mapping[str, tuple[int, int]]

    @property
    def coding(self) -> str:
        """How its numbers are coded: one description, or those of its parts where they differ, joined by ``+``."""
        return " + ".join(sorted({segment.coding.describe for segment in self.segments}))

    @property
    def has_values(self) -> bool:
        """Whether a part of it, or all, is stored as values."""
        return any(isinstance(segment.coding, Values) for segment in self.segments)

    @property
    def value_dtype(self) -> torch.dtype:
        """Of its values: the widest that it is stored in, or bf16 where a part of it is codes."""
        if not all(isinstance(segment.coding, Values) for segment in self.segments):
            return torch.bfloat16
        return reduce(torch.promote_types, (segment.entry.torch_dtype for segment in self.segments))

    @property
    def entries(self) -> tuple[Entry, ...]:
        return tuple(dict.fromkeys(segment.entry for segment in self.segments))

    @property
    def due(self) -> Entry:
        """The tensor with which it is handed over as a whole: its last part."""
        return self.entries[-1]

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)

    @property
    def rotation(self) -> int:
        """Group of this package's rotation that all its codes were made after; 0 for none, or not one for all."""
        found = {segment.coding.rotation if isinstance(segment.coding, Scaled) else 0 for segment in self.segments}
        return found.pop() if len(found) == 1 else 0

    def has_codes(self, fmt: CodeFormat) -> bool:
        """Whether all its codes can be used as they are by a linear of ``fmt``: one scale a row, one rotation."""
        rotations = set()
        for segment in self.segments:
            coding = segment.coding
            if not isinstance(coding, Scaled) or not coding.by_rows or segment.entry.torch_dtype is not fmt.dtype:
                return False
            rotations.add(coding.rotation)
        return len(rotations) == 1

    def whole(self) -> torch.Tensor | None:
        """Its codes or values mapped from the file, where the file has them as the model does; None elsewhere."""
        only = self.segments[0]
        if len(self.segments) > 1 or only.rows != only.entry.shape[0]:
            return None
        return mapped(only.entry)

    def row_scale(self, first: int, count: int) -> torch.Tensor:
        """``(count, 1)`` fp32 scales of the rows from ``first`` on, on the host; for :meth:`has_codes`."""
        cuts = [cut for _, cut in self._cut(first, count)]
        return torch.cat([cut.coding.row_scale(cut.file_row, cut.rows) for cut in cuts])  # type: ignore[attr-defined]

    def codes(self, first: int, count: int) -> torch.Tensor:
        """``(count, K)`` codes of the rows from ``first`` on, on the host."""
        cuts = [cut for _, cut in self._cut(first, count)]
        pieces = [mapped(cut.entry)[cut.file_row : cut.file_row + cut.rows] for cut in cuts]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def values(self, first: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """``(count, K)`` values of the rows from ``first`` on, on the host; mapped where they are stored so."""
        cuts = list(self._cut(first, count))
        cut = cuts[0][1] if len(cuts) == 1 else None
        if cut is not None and isinstance(cut.coding, Values) and cut.entry.torch_dtype is dtype:
            return mapped(cut.entry)[cut.file_row : cut.file_row + cut.rows]
        target = torch.empty(count, self.shape[1], dtype=dtype)
        self.fill(target, first)
        return target

    def fill(self, target: torch.Tensor, first: int) -> None:
        """Write rows from ``first`` on into ``target``, codes where it has their dtype and values elsewhere.

        Args:
            target: ``(count, K)``, on the host or on a GPU; copies to a GPU are enqueued on its current stream.
            first: the first row, in the model's order.
        """
        for row, cut, raw in self._raw(first, target.shape[0], target.is_cuda):
            into = target[row : row + raw.shape[0]]
            if raw.dtype is target.dtype:
                into.copy_(raw, non_blocking=True)
            else:
                into.copy_(cut.coding.decode(raw.to(target.device, non_blocking=True), cut.file_row))

    def _raw(self, first: int, count: int, staged: bool) -> Iterator[tuple[int, Segment, torch.Tensor]]:
        """Rows as they are stored, each with its place behind ``first`` and the segment that it is.

        Tensors are read from front to back, whatever order the model has their rows in.
        """
        cuts = sorted(self._cut(first, count), key=lambda item: (str(item[1].entry.file), _position(item[1])))
        for _, found in groupby(cuts, key=lambda item: item[1].entry):
            run: list[tuple[int, Segment]] = []
            for place, cut in found:
                if run and run[-1][1].file_row + run[-1][1].rows != cut.file_row:
                    yield from _read_run(run, staged)
                    run = []
                run.append((place, cut))
            yield from _read_run(run, staged)

    def _cut(self, first: int, count: int) -> Iterator[tuple[int, Segment]]:
        """The segments that make up rows ``first`` to ``first + count``, each with its place among them."""
        begin = 0
        for segment in self.segments:
            low, high = max(first, begin), min(first + count, begin + segment.rows)
            if low < high:
                yield low - first, Segment(segment.entry, segment.coding, segment.file_row + low - begin, high - low)
            begin += segment.rows


def _position(segment: Segment) -> int:
    return segment.entry.start + segment.file_row * segment.entry.row_nbytes


def _read_run(run: list[tuple[int, Segment]], staged: bool) -> Iterator[tuple[int, Segment, torch.Tensor]]:
    """Rows of segments that follow each other in one tensor."""
    entry, first = run[0][1].entry, run[0][1].file_row
    count = sum(cut.rows for _, cut in run)
    for row, piece in stage().rows(entry, first, count) if staged else _host_rows(entry, first, count):
        for place, cut in run:
            low, high = max(row, cut.file_row), min(row + piece.shape[0], cut.file_row + cut.rows)
            if low < high:
                part = Segment(entry, cut.coding, low, high - low)
                yield place + low - cut.file_row, part, piece[low - row : high - row]


def _host_rows(entry: Entry, first: int, count: int) -> Iterator[tuple[int, torch.Tensor]]:
    tensor = mapped(entry)
    step = max(CHUNK // max(entry.row_nbytes, 1), 1)
    for row in range(first, first + count, step):
        yield row, tensor[row : min(row + step, first + count)]
