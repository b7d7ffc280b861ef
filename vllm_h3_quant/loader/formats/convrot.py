"""ConvRot's codes: of a weight whose columns are multiplied by a regular Hadamard matrix (arXiv 2512.03673)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.loader.coding import Scaled

_GROUPS = (4, 16, 64, 256, 1024)
_USUAL = 256


@dataclass(frozen=True)
class ConvRot(Scaled):
    """``W R`` as 8-bit codes with scales, where ``R`` turns each ``group`` of neighbouring columns.

    Attributes:
        group: order of ``R``, the Kronecker power of the regular Hadamard matrix of order 4.
    """

    group: int = field(kw_only=True)

    @property
    def describe(self) -> str:
        return f"{super().describe}, ConvRot {self.group}"

    @property
    def by_rows(self) -> bool:
        return False  # no activation is turned by this matrix

    def turned_back(self, values: torch.Tensor) -> torch.Tensor:
        groups = values.reshape(-1, self.group)
        return (groups @ regular_hadamard(self.group).to(values.device)).reshape(values.shape)


def group_of(stated: Mapping[str, Any], columns: int, where: str) -> int:
    """The group that a statement about codes of ``columns`` columns names, 256 where it names none.

    Raises:
        H3QuantError: it is no power of 4 up to 1024 that divides the columns.
    """
    group = stated.get("convrot_groupsize", _USUAL)
    if type(group) is not int or group not in _GROUPS or columns % group:
        raise H3QuantError(
            f"{where} states convrot_groupsize={group!r}; expected a power of 4 up to {_GROUPS[-1]} that divides"
            f" {columns} columns"
        )
    return group


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
