"""What a linear method asks of a stored weight, whatever format it is stored in."""

from __future__ import annotations

from typing import Protocol

import torch

from vllm_h3_quant.kernels.formats import CodeFormat


class WeightSource(Protocol):
    """A whole weight, ``(N, K)`` over all ranks, with rows in the model's order.

    Rows are named by the first and their number; what is returned lies on the host.
    """

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, K)``."""
        ...

    @property
    def rotation(self) -> int:
        """Group of the rotation that its codes were made after, 0 for none."""
        ...

    def has_codes(self, fmt: CodeFormat) -> bool:
        """Whether it has codes of ``fmt`` with one scale a row."""
        ...

    def whole(self) -> torch.Tensor | None:
        """All codes, mapped from a file, where the file has them in this order."""
        ...

    def codes(self, first: int, count: int) -> torch.Tensor:
        """``(count, K)`` codes."""
        ...

    def row_scale(self, first: int, count: int) -> torch.Tensor:
        """``(count, 1)`` fp32 scales of codes."""
        ...

    def values(self, first: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """``(count, K)`` values."""
        ...

    def fill(self, target: torch.Tensor, first: int) -> None:
        """Write rows into ``(count, K)`` on any device: codes where it has their dtype, values elsewhere."""
        ...
