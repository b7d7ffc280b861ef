"""Synthetic operands of attention and its exact result, for tests and benchmarks."""

from __future__ import annotations

from enum import Enum

import torch


class Outliers(str, Enum):
    """What stands out in Q and K beside a lognormal spread and a bias of each channel."""

    NONE = "none"
    HUGE_K = "huge-k"
    """Four channels of K are 100 times as large, as in the last blocks of MiniMax-H3."""
    ROTARY = "rotary"
    """Two rotary pairs of Q and K are 8 times as large and turn with the position, over 96 of 128 channels."""


def synthetic_qkv(
    tokens: int,
    heads: int,
    head_size: int,
    amplitude: float,
    *,
    device: torch.device,
    seed: int = 0,
    outliers: Outliers = Outliers.NONE,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """bf16 ``(tokens, heads, head_size)`` views of one qkv tensor, as a fused projection leaves them.

    Q and K are ``n * exp(s g) + b g'`` with normal ``n`` a value and ``g, g'`` a channel, ``s = 0.5, 0.6`` and
    ``b = 0.5, 1.5``, scaled to an RMS of ``amplitude`` in each token like a normed head, so that scores grow with its
    square. V has ``s = 0.5, b = 1``.
    """
    generator = torch.Generator(device).manual_seed(seed)
    qkv = torch.empty(tokens, 3, heads, head_size, dtype=torch.bfloat16, device=device)
    for part, spread, bias in ((0, 0.5, 0.5), (1, 0.6, 1.5), (2, 0.5, 1.0)):
        for head in range(heads):
            channels = torch.randn(2, head_size, generator=generator, device=device)
            x = torch.randn(tokens, head_size, generator=generator, device=device)
            x = x * torch.exp(channels[0] * spread) + channels[1] * bias
            if part < 2:
                x = _with_outliers(x, outliers, is_key=part == 1)
                x = x / x.square().mean(-1, keepdim=True).sqrt() * amplitude
                if outliers is Outliers.ROTARY:
                    x = _turned(x)
            qkv[:, part, head] = x.bfloat16()
    q, k, v = qkv.unbind(1)
    return q, k, v


def _with_outliers(x: torch.Tensor, outliers: Outliers, *, is_key: bool) -> torch.Tensor:
    size = x.shape[-1]
    if outliers is Outliers.HUGE_K and is_key:
        x[:, [size // 40, size // 3, size * 3 // 5, size - 8]] *= 100
    elif outliers is Outliers.ROTARY:
        pairs = size * 3 // 8
        x[:, [5, 5 + pairs]] *= 8
        x[:, [11, 11 + pairs]] *= 8
    return x


def _turned(x: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of neighbouring halves over three quarters of the channels."""
    tokens, size = x.shape
    pairs = size * 3 // 8
    frequency = 10000.0 ** (-torch.arange(pairs, device=x.device) / pairs)
    angle = torch.arange(tokens, device=x.device)[:, None] * frequency
    first, second, rest = x.split((pairs, pairs, size - 2 * pairs), dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((first * cos - second * sin, first * sin + second * cos, rest), dim=-1)


def exact_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    *,
    rows: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """``softmax(q k^T * softmax_scale) v`` of one document, by head in ``dtype``.

    Args:
        q, k, v: ``(tokens, heads, head_size)``.
        softmax_scale: of the scores.
        rows: tokens whose output is wanted; all when None.
        dtype: fp32 for long sequences on a GPU.

    Returns:
        ``(rows, heads, head_size)``.
    """
    wanted = q if rows is None else q[rows]
    out = torch.empty(wanted.shape, dtype=dtype, device=q.device)
    for head in range(q.shape[1]):
        scores = wanted[:, head].to(dtype) @ k[:, head].to(dtype).t() * softmax_scale
        out[:, head] = torch.softmax(scores, dim=-1) @ v[:, head].to(dtype)
    return out
