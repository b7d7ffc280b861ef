"""RMSNorm and rotary embedding of Q and K, computed while they are read.

For a head's ``D`` bf16 channels, with ``R`` of them rotated in halves ``(d, d + R/2)``::

    n = x / sqrt(mean(x^2) + eps) * weight                      rounded to bf16
    y = n[d] cos - n[d + R/2] sin,  n[d + R/2] cos + n[d] sin    rounded to bf16
    y = n                                                       for channels from R on

The mean square of a row is summed by one warp with ``D / 32`` neighbouring channels a thread, which is the order
of vLLM-Omni's kernel. It is summed once, in the first pass over Q and K, and kept as ``1 / sqrt(...)``, so that
the second pass may hold its channels in any order. A product of two bf16 values is exact in fp32, so that nothing
else depends on an order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl


class Rotary(NamedTuple):
    """Norm and rotation of one packed sequence.

    Attributes:
        q_weight, k_weight: ``(D,)`` bf16 weights of the norms.
        table: ``(tokens, R)`` bf16, ``R / 2`` cosines and as many sines of each token.
        eps: added to the mean square.
        inverse: ``(2, heads, tokens)`` fp32 scratch: ``1 / rms`` of each row of Q and K. Written by the first pass,
            read by the second.
    """

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    table: torch.Tensor
    eps: float
    inverse: torch.Tensor

    @property
    def half(self) -> int:
        """Rotated pairs of channels."""
        return self.table.shape[1] // 2


def rotary_of(q_weight: torch.Tensor, k_weight: torch.Tensor, table: torch.Tensor, eps: float, *, heads: int) -> Rotary:
    """Norm and rotation with memory for their first pass; see :class:`Rotary`."""
    inverse = torch.empty(2, heads, table.shape[0], dtype=torch.float32, device=table.device)
    return Rotary(q_weight, k_weight, table.contiguous(), eps, inverse)


def rotary_arguments(rotary: Rotary | None, unused: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Weights, table and scratch as kernels take them; ``unused`` in their place where there is nothing to do."""
    return (unused,) * 4 if rotary is None else (rotary.q_weight, rotary.k_weight, rotary.table, rotary.inverse)


def rotary_constants(rotary: Rotary | None) -> dict[str, Any]:
    """Compile-time arguments of the kernels; HALF is 0 where there is nothing to do."""
    return {"HALF": 0, "EPS": 0.0} if rotary is None else {"HALF": rotary.half, "EPS": rotary.eps}


@triton.jit
def other_channel(channel, HALF: tl.constexpr, GROUP: tl.constexpr):
    """The channel that each one is rotated with; itself where there is none. Neighbours stay neighbours."""
    other = tl.where(channel < HALF, channel + HALF, tl.where(channel < 2 * HALF, channel - HALF, channel))
    return tl.max_contiguous(tl.multiple_of(other, GROUP), GROUP)


@triton.jit
def frequency(channel, HALF: tl.constexpr, GROUP: tl.constexpr):
    """The column of the table that holds a channel's cosine."""
    found = tl.where(channel < HALF, channel, tl.where(channel < 2 * HALF, channel - HALF, 0))
    return tl.max_contiguous(tl.multiple_of(found, GROUP), GROUP)


@triton.jit
def normed(x, inverse, weight):
    """``x * inverse * weight`` rounded to bf16, as fp32."""
    return (x * inverse * weight).to(tl.bfloat16).to(tl.float32)


@triton.jit
def signed(other_weight, channel, HALF: tl.constexpr):
    """The weight of the other channel with the sign of its sine: a factor, because ``-x`` turns +0 into +0."""
    return other_weight * tl.where(channel < HALF, -1.0, 1.0)


@triton.jit
def turned(n, other, cos, sin, channel, HALF: tl.constexpr):
    """Rows after the rotation, rounded to bf16, as fp32; ``other`` is normed with its :func:`signed` weight."""
    return tl.where(channel < 2 * HALF, n * cos + other * sin, n).to(tl.bfloat16).to(tl.float32)
