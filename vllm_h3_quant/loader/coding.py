"""How the numbers of a stored weight are coded, and what they are.

A coding belongs to one tensor of a checkpoint, with rows as the file has them; a caller names the first row of
those that it decodes. What only one format knows is in that format's file (:mod:`vllm_h3_quant.loader.formats`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch

from vllm_h3_quant.kernels.hadamard import undo_hadamard


class Coding(ABC):
    """What the numbers of one tensor stand for."""

    @property
    @abstractmethod
    def describe(self) -> str:
        """What it is, for a count of linears by their codings."""

    @abstractmethod
    def decode(self, raw: torch.Tensor, row: int) -> torch.Tensor:
        """fp32 values of rows of the tensor, ``row`` being the first of them in the file."""

    def columns(self, stored: int) -> int:
        """Columns of the weight for as many in the file."""
        return stored


@dataclass(frozen=True)
class Values(Coding):
    """Plain floating-point numbers."""

    @property
    def describe(self) -> str:
        return "values"

    def decode(self, raw: torch.Tensor, row: int) -> torch.Tensor:
        return raw.float()


@dataclass(frozen=True)
class Scaled(Coding):
    """8-bit codes: ``W[n, k] = codes[n, k] * scale[n // row_block, k // column_block]``, rotated back where rotated.

    Attributes:
        scale: fp32, two-dimensional, on the host.
        row_block: rows that share a scale.
        column_block: columns that share a scale.
        rotation: group of this package's rotation (:mod:`vllm_h3_quant.kernels.hadamard`), 0 for none.
    """

    scale: torch.Tensor = field(repr=False)
    row_block: int
    column_block: int
    rotation: int = 0

    @property
    def describe(self) -> str:
        columns = self.scale.shape[1]
        kind = "per tensor" if self.scale.numel() == 1 else "per channel" if columns == 1 else "by block"
        return f"codes, scale {kind}" + (f", rotated {self.rotation}" if self.rotation else "")

    @property
    def by_rows(self) -> bool:
        """Whether one scale serves a whole row of codes as they are in the file."""
        return self.scale.shape[1] == 1

    def row_scale(self, row: int, count: int) -> torch.Tensor:
        """``(count, columns of scale)`` scales of the rows from ``row`` on; one column for :attr:`by_rows`."""
        # Slices where a row has a scale of its own: the host's threads are busy reading while a linear is loaded.
        if self.row_block == 1:
            return self.scale[row : row + count]
        first = row // self.row_block
        found = self.scale[first : (row + count - 1) // self.row_block + 1].repeat_interleave(self.row_block, dim=0)
        return found[row - first * self.row_block :][:count]

    def decode(self, raw: torch.Tensor, row: int) -> torch.Tensor:
        scale = self.row_scale(row, raw.shape[0]).to(raw.device)
        if scale.shape[1] > 1:
            scale = scale.repeat_interleave(self.column_block, dim=1)[:, : raw.shape[1]]
        return self.turned_back(raw.float() * scale)

    def turned_back(self, values: torch.Tensor) -> torch.Tensor:
        """Columns of the weight from those that the codes were made of."""
        return undo_hadamard(values, self.rotation) if self.rotation else values
