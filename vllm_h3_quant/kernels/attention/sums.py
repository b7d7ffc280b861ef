"""Sums and extremes over the rows of one head, by one warp."""

from __future__ import annotations

import triton
import triton.language as tl

ROWS = 2
"""Rows that a program holds sums of: one warp, so that nothing is exchanged between warps."""
UNROLL = 8
"""Loads of that many rows that are on their way at once."""


@triton.jit
def row_sums(
    source,
    stride,
    count,
    RANGE: tl.constexpr,
    PEAKS: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Of ``count`` rows, in ROWS strands: sum, sum of squares, smallest and largest value (RANGE) or magnitude."""
    row = tl.arange(0, ROWS)
    total = tl.zeros([ROWS, SIZE], tl.float32)
    square = tl.zeros([ROWS, SIZE], tl.float32)
    low = tl.full([ROWS, SIZE], float("inf"), tl.float32)
    high = tl.full([ROWS, SIZE], float("-inf"), tl.float32)
    for start in range(0, count, ROWS * UNROLL):
        for step in tl.static_range(UNROLL):
            taken = start + step * ROWS + row
            kept = (taken < count)[:, None]
            x = tl.load(source + taken.to(tl.int64)[:, None] * stride, mask=kept, other=0.0).to(tl.float32)
            total += x
            if RANGE:
                low = tl.minimum(low, tl.where(kept, x, float("inf")))
                high = tl.maximum(high, tl.where(kept, x, float("-inf")))
            else:
                square += x * x
                if PEAKS:
                    high = tl.maximum(high, tl.abs(x))
    return total, square, low, high


@triton.jit
def store_value_sums(source, stride, count, out, kept, SIZE: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr):
    """Sum, smallest and largest value of each channel of V, one after the other from ``out`` on."""
    channel = tl.arange(0, SIZE)
    out += channel
    total, _, low, high = row_sums(source + channel, stride, count, True, False, SIZE, ROWS, UNROLL)
    tl.store(out, tl.sum(total, axis=0), mask=kept)
    tl.store(out + SIZE, tl.min(low, axis=0), mask=kept)
    tl.store(out + 2 * SIZE, tl.max(high, axis=0), mask=kept)
