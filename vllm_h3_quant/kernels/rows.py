"""Rows of 8-bit codes as a value that travels from what produces them to the linear that takes them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from vllm_h3_quant.kernels.formats import BY_NAME, CodeFormat


class RowFormat(NamedTuple):
    """What a linear wants of its activations.

    Attributes:
        name: of the code format.
        rotation: width of the Hadamard groups, 0 for none.
    """

    name: str
    rotation: int

    @property
    def fmt(self) -> CodeFormat:
        """The code format itself."""
        return BY_NAME[self.name]


class QuantizedRows(NamedTuple):
    """Activations that are quantized already: ``codes * scale`` stands for ``(M, K)`` values, rotated or not.

    Attributes:
        codes: ``(M, K)``, contiguous.
        scale: ``(M, 1)`` fp32.
        dtype: of the values before they became codes, and of what a linear makes of them.
        format: how the codes were made.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    dtype: torch.dtype
    format: RowFormat

    @property
    def shape(self) -> torch.Size:
        """``(M, K)``."""
        return self.codes.shape
