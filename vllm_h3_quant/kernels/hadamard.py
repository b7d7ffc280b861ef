"""Group-wise Hadamard rotation of the last dimension.

``y = x H / sqrt(g)`` for each group of ``g`` neighbouring elements, with the Sylvester matrix ``H``
of order ``g``, a power of two. The rotation is orthogonal, so rotating both operands of a product
over the same dimension leaves the product as it is, while single large channels spread over their
group (QuaRot, arXiv 2404.00456).

The sum is a butterfly in fp32 with strides 1, 2, 4, ... and one final multiplication. Every step is
a correctly rounded addition, so each implementation that keeps this order gives the same bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def largest_group(size: int, limit: int) -> int:
    """The largest power of two up to ``limit`` that divides ``size``; 0 when that is 1."""
    group = min(size & -size, limit)
    return group if group > 1 else 0


def hadamard_reference(x: torch.Tensor, group: int) -> torch.Tensor:
    """Rotate the last dimension of ``x`` in groups of ``group``; the result is fp32.

    Raises:
        ValueError: ``group`` is no power of two or does not divide the last dimension.
    """
    if group < 2 or group & (group - 1) or x.shape[-1] % group:
        raise ValueError(f"Hadamard group {group} must be a power of two that divides {x.shape[-1]}")
    shape = x.shape
    y = x.float()
    stride = 1
    while stride < group:
        pairs = y.reshape(-1, 2, stride)
        first, second = pairs[:, 0], pairs[:, 1]
        y = torch.stack((first + second, first - second), dim=1)
        stride *= 2
    return y.reshape(shape) * group**-0.5


@triton.jit
def hadamard_block(x, LEVELS: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr):
    """Butterfly over a one-dimensional fp32 block of BLOCK elements in groups of 2^LEVELS."""
    for level in tl.static_range(LEVELS):
        pairs = tl.permute(tl.reshape(x, (BLOCK // (2 << level), 2, 1 << level)), (0, 2, 1))
        first, second = tl.split(pairs)
        joined = tl.join(first + second, first - second)
        x = tl.reshape(tl.permute(joined, (0, 2, 1)), (BLOCK,))
    return x * NORM
