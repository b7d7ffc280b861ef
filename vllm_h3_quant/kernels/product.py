"""The operands of a scaled 8-bit product."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Product(NamedTuple):
    """``out[m, n] = (sum_k a[m, k] * b[k, n]) * scale_a[m] * scale_b[n] + bias[n]``.

    Attributes:
        a: ``(M, K)`` codes, contiguous.
        b: ``(K, N)`` codes with stride ``(1, K)``.
        scale_a: ``(M, 1)`` fp32.
        scale_b: ``(1, N)`` fp32.
        bias: ``(N,)`` floating point, or None.
        out_dtype: what the product is rounded to.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale_a: torch.Tensor
    scale_b: torch.Tensor
    bias: torch.Tensor | None
    out_dtype: torch.dtype

    def empty_out(self) -> torch.Tensor:
        """Memory for the ``(M, N)`` result."""
        return torch.empty(self.a.shape[0], self.b.shape[1], dtype=self.out_dtype, device=self.a.device)

    def bias_as_out(self) -> torch.Tensor | None:
        """The bias in ``out_dtype``, which library kernels ask for."""
        return None if self.bias is None else self.bias.to(self.out_dtype)

    def scale(self, sums: torch.Tensor) -> torch.Tensor:
        """The result from fp32 ``sums``, in plain PyTorch."""
        out = sums * self.scale_a * self.scale_b
        return (out if self.bias is None else out + self.bias.float()).to(self.out_dtype)
