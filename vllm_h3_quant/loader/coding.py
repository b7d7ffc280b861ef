"""How the numbers of a stored weight are coded, and what they are.

A coding belongs to one tensor of a checkpoint, with rows as the file has them; a caller names the first row of
those that it decodes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import torch

from vllm_h3_quant.kernels.hadamard import undo_hadamard


@dataclass(frozen=True)
class Values:
    """Plain floating-point numbers."""

    @property
    def describe(self) -> str:
        return "values"

    def columns(self, stored: int) -> int:
        """Columns of the weight for as many in the file."""
        return stored

    def decode(self, raw: torch.Tensor, row: int) -> torch.Tensor:
        """fp32 of ``raw``."""
        return raw.float()


@dataclass(frozen=True)
class Scaled:
    """8-bit codes: ``W[n, k] = codes[n, k] * scale[n // row_block, k // column_block]``, rotated back where rotated.

    Attributes:
        scale: fp32, two-dimensional, on the host.
        row_block: rows that share a scale.
        column_block: columns that share a scale.
        regular: group of ConvRot's rotation of the columns, 0 for none: the Kronecker power of the regular
            Hadamard matrix of order 4 (arXiv 2512.03673).
        rotation: group of this package's rotation (:mod:`vllm_h3_quant.kernels.hadamard`), 0 for none.
    """

    scale: torch.Tensor = field(repr=False)
    row_block: int
    column_block: int
    regular: int = 0
    rotation: int = 0

    @property
    def describe(self) -> str:
        columns = self.scale.shape[1]
        kind = "per tensor" if self.scale.numel() == 1 else "per channel" if columns == 1 else "by block"
        turned = f", ConvRot {self.regular}" if self.regular else f", rotated {self.rotation}" if self.rotation else ""
        return f"codes, scale {kind}{turned}"

    def columns(self, stored: int) -> int:
        """Columns of the weight for as many in the file."""
        return stored

    @property
    def by_rows(self) -> bool:
        """Whether one scale serves a whole row of codes as they are in the file."""
        return self.scale.shape[1] == 1 and not self.regular

    def row_scale(self, row: int, count: int) -> torch.Tensor:
        """``(count, columns of scale)`` scales of the rows from ``row`` on; one column for :attr:`by_rows`."""
        # Slices where a row has a scale of its own: the host's threads are busy reading while a linear is loaded.
        if self.row_block == 1:
            return self.scale[row : row + count]
        first = row // self.row_block
        found = self.scale[first : (row + count - 1) // self.row_block + 1].repeat_interleave(self.row_block, dim=0)
        return found[row - first * self.row_block :][:count]

    def decode(self, raw: torch.Tensor, row: int) -> torch.Tensor:
        """fp32 values of codes whose first row is ``row`` in the file."""
        scale = self.row_scale(row, raw.shape[0]).to(raw.device)
        if scale.shape[1] > 1:
            scale = scale.repeat_interleave(self.column_block, dim=1)[:, : raw.shape[1]]
        values = raw.float() * scale
        if self.regular:
            groups = values.reshape(-1, self.regular)
            return (groups @ regular_hadamard(self.regular).to(raw.device)).reshape(values.shape)
        return undo_hadamard(values, self.rotation) if self.rotation else values


@dataclass(frozen=True)
class NvFp4:
    """Two e2m1 codes a byte, the first in the low half: ``W[n, k] = e2m1 * scale[n, k // 16] * global_scale``.

    Attributes:
        scale: ``(N, K / 16)`` e4m3 on the host.
        global_scale: fp32.
    """

    scale: torch.Tensor = field(repr=False)
    global_scale: float

    @property
    def describe(self) -> str:
        return "NVFP4 codes"

    def columns(self, stored: int) -> int:
        """Columns of the weight for as many bytes in the file."""
        return 2 * stored

    def decode(self, raw: torch.Tensor, row: int) -> torch.Tensor:
        """fp32 values of packed codes whose first row is ``row`` in the file."""
        table = torch.tensor(E2M1, dtype=torch.float32, device=raw.device)
        halves = torch.stack((raw & 0xF, raw >> 4), dim=-1).reshape(raw.shape[0], -1)
        scale = self.scale[row : row + raw.shape[0]].to(raw.device).float() * self.global_scale
        return table[halves.int()] * scale.repeat_interleave(NVFP4_BLOCK, dim=1)


Coding = Values | Scaled | NvFp4

NVFP4_BLOCK = 16
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of the 16 codes of e2m1 (OCP Microscaling Formats 1.0)."""


@cache
def regular_hadamard(group: int) -> torch.Tensor:
    """The orthogonal, symmetric ``(group, group)`` matrix of ConvRot; ``group`` is a power of 4."""
    # Spelt out: vLLM-Omni loads a model with bf16 as the default dtype.
    ones = torch.ones(4, 4, dtype=torch.float32, device="cpu")
    four = ones - 2 * torch.eye(4, dtype=torch.float32, device="cpu").flip(0)
    matrix = ones[:1, :1]
    while matrix.shape[0] < group:
        matrix = torch.kron(matrix, four)
    if matrix.shape[0] != group:
        raise ValueError(f"a regular Hadamard matrix has the order of a power of 4, not {group}")
    return matrix / group**0.5
