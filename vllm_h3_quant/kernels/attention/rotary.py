"""RMSNorm and rotary embedding of Q and K, in the pass that sums for means and factors.

For a head's ``D`` bf16 channels, with ``R`` of them rotated in halves ``(d, d + R/2)``::

    n = x / sqrt(mean(x^2) + eps) * weight                      rounded to bf16
    y = n[d] cos - n[d + R/2] sin,  n[d + R/2] cos + n[d] sin    rounded to bf16
    y = n                                                       for channels from R on

Rows are left behind for the pass that makes codes. The mean square of a row is summed by one warp with ``D / 32``
neighbouring channels a thread, which is the order of vLLM-Omni's kernel; a product of two bf16 values is exact in
fp32, so that nothing else depends on an order. The two halves lie in two tiles: no thread needs another's channels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_h3_quant.kernels.attention.documents import TILE_FIELDS, Documents
from vllm_h3_quant.kernels.attention.sums import ROWS, UNROLL, store_value_sums
from vllm_h3_quant.kernels.encode import as_bf16

_REGISTERS = 80
"""A thread: 24 warps run at once on a multiprocessor."""


class Rotary(NamedTuple):
    """Norm and rotation of one packed sequence.

    Attributes:
        q_weight, k_weight: ``(D,)`` bf16 weights of the norms.
        table: ``(tokens, R)`` bf16, ``R / 2`` cosines and as many sines of each token.
        eps: added to the mean square.
        rows: ``(2, tokens, heads, D)`` bf16: Q and K after norm and rotation, once they are summed.
    """

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    table: torch.Tensor
    eps: float
    rows: torch.Tensor


def rotary_of(q_weight: torch.Tensor, k_weight: torch.Tensor, table: torch.Tensor, eps: float, *, heads: int) -> Rotary:
    """Norm and rotation with memory for their result; see :class:`Rotary`."""
    rows = torch.empty(2, table.shape[0], heads, q_weight.shape[0], dtype=torch.bfloat16, device=table.device)
    return Rotary(q_weight, k_weight, table.contiguous(), eps, rows)


def sum_turned(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: Documents,
    rotary: Rotary,
    parts: torch.Tensor,
    *,
    peaks: bool,
) -> None:
    """Write ``rotary.rows``, and what :mod:`.scaling` sums of them and of V.

    Args:
        q, k, v: ``(tokens, heads, D)`` of the projection, any strides, the last one 1.
        documents: of the packed sequence.
        rotary: norm and rotation.
        parts: ``(tiles, heads, 8, D)`` fp32 sums, written.
        peaks: whether the largest magnitudes are wanted.
    """
    _, heads, size = q.shape
    half = rotary.table.shape[1] // 2
    _turn_kernel[(documents.tiles.shape[0], heads, 3)](
        q, k, v, documents.tiles, parts,
        rotary.q_weight, rotary.k_weight, rotary.table, *rotary.rows,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], heads,
        EPS=rotary.eps, HALF=half, PAIRS=triton.next_power_of_2(half), REST=triton.next_power_of_2(size - 2 * half),
        PEAKS=peaks, SIZE=size, FIELDS=parts.shape[2], ROWS=ROWS, UNROLL=UNROLL,
        INTERPRETED=triton.knobs.runtime.interpret, num_warps=1, maxnreg=_REGISTERS,
    )  # fmt: skip


@triton.jit
def _turn_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    tiles_ptr,
    parts_ptr,
    q_weight_ptr,
    k_weight_ptr,
    table_ptr,
    q_rows_ptr,
    k_rows_ptr,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    heads,
    EPS: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    PEAKS: tl.constexpr,
    SIZE: tl.constexpr,
    FIELDS: tl.constexpr,
    ROWS: tl.constexpr,
    UNROLL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    tile = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    operand = tl.program_id(2)
    first = tl.load(tiles_ptr + tile * TILE_FIELDS + 1).to(tl.int64)
    count = tl.load(tiles_ptr + tile * TILE_FIELDS + 2)
    filled = count > 0
    part = parts_ptr + (tile.to(tl.int64) * heads + head) * FIELDS * SIZE
    turns = table_ptr + first * (2 * HALF)
    out = (first * heads + head) * SIZE
    # V has no norm; its programs wait for memory while those of Q and K compute.
    if operand == 0:
        _turn(
            q_ptr + first * q_token + head * q_head, q_token, q_rows_ptr + out, q_weight_ptr, turns, count, heads,
            part, part, part + 6 * SIZE, filled, False, EPS, HALF, PAIRS, REST, PEAKS, SIZE, INTERPRETED,
        )  # fmt: skip
    elif operand == 1:
        _turn(
            k_ptr + first * k_token + head * k_head, k_token, k_rows_ptr + out, k_weight_ptr, turns, count, heads,
            part + SIZE, part + 2 * SIZE, part + 7 * SIZE, filled, True, EPS, HALF, PAIRS, REST, PEAKS, SIZE,
            INTERPRETED,
        )  # fmt: skip
    else:
        source = v_ptr + first * v_token + head * v_head
        store_value_sums(source, v_token, count, part + 3 * SIZE, filled, SIZE, ROWS, UNROLL)


@triton.jit
def _turn(
    source,
    stride,
    out,
    weight_ptr,
    turns,
    count,
    heads,
    sums,
    squares,
    peaks,
    filled,
    SUMS: tl.constexpr,
    EPS: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    PEAKS: tl.constexpr,
    SIZE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Norm and rotation of ``count`` rows of one head, and the sums of their channels."""
    row = tl.arange(0, 2)
    pair = tl.arange(0, PAIRS)
    rest = 2 * HALF + tl.arange(0, REST)
    is_pair = pair < HALF
    is_rest = rest < SIZE
    low_weight = tl.load(weight_ptr + pair, mask=is_pair, other=0.0).to(tl.float32)
    high_weight = tl.load(weight_ptr + HALF + pair, mask=is_pair, other=0.0).to(tl.float32)
    rest_weight = tl.load(weight_ptr + rest, mask=is_rest, other=0.0).to(tl.float32)
    # Even and odd rows are summed apart, one after the other, which is the order of the other kernel.
    low_sum = tl.zeros([2, PAIRS], tl.float32)
    low_square = tl.zeros([2, PAIRS], tl.float32)
    low_peak = tl.zeros([2, PAIRS], tl.float32)
    high_sum = tl.zeros([2, PAIRS], tl.float32)
    high_square = tl.zeros([2, PAIRS], tl.float32)
    high_peak = tl.zeros([2, PAIRS], tl.float32)
    rest_sum = tl.zeros([2, REST], tl.float32)
    rest_square = tl.zeros([2, REST], tl.float32)
    rest_peak = tl.zeros([2, REST], tl.float32)
    # Offsets of two rows; what moves from step to step are the addresses of the first.
    low_in = row[:, None] * stride + pair
    rest_in = row[:, None] * stride + rest
    low_out = row[:, None] * (heads * SIZE) + pair
    rest_out = row[:, None] * (heads * SIZE) + rest
    turn_in = row[:, None] * (2 * HALF) + pair
    even, odd = _two_rows(source, stride, 0, count, SIZE)
    for start in range(0, count, 2):
        inverse_even = _inverse_rms(even, EPS, SIZE)
        inverse_odd = _inverse_rms(odd, EPS, SIZE)
        inverse = tl.where(row == 0, inverse_even, inverse_odd)[:, None]
        # The next rows are on their way to the cache while these are worked on.
        even, odd = _two_rows(source + 2 * stride, stride, start + 2, count, SIZE)
        kept = (start + row < count)[:, None]
        in_pair = kept & is_pair
        in_rest = kept & is_rest
        low = _normed(source + low_in, in_pair, inverse, low_weight, INTERPRETED)
        high = _normed(source + HALF + low_in, in_pair, inverse, high_weight, INTERPRETED)
        same = _normed(source + rest_in, in_rest, inverse, rest_weight, INTERPRETED)
        cos = tl.load(turns + turn_in, mask=in_pair, other=0.0).to(tl.float32)
        sin = tl.load(turns + HALF + turn_in, mask=in_pair, other=0.0).to(tl.float32)
        low_turned = as_bf16(low * cos - high * sin, INTERPRETED)
        high_turned = as_bf16(high * cos + low * sin, INTERPRETED)
        tl.store(out + low_out, low_turned, mask=in_pair)
        tl.store(out + HALF + low_out, high_turned, mask=in_pair)
        tl.store(out + rest_out, as_bf16(same, INTERPRETED), mask=in_rest)
        source += 2 * stride
        out += 2 * heads * SIZE
        turns += 4 * HALF
        low = low_turned.to(tl.float32)
        high = high_turned.to(tl.float32)
        if SUMS:
            low_sum += low
            high_sum += high
            rest_sum += same
        low_square += low * low
        high_square += high * high
        rest_square += same * same
        if PEAKS:
            low_peak = tl.maximum(low_peak, tl.abs(low))
            high_peak = tl.maximum(high_peak, tl.abs(high))
            rest_peak = tl.maximum(rest_peak, tl.abs(same))

    in_pair = filled & is_pair
    in_rest = filled & is_rest
    tl.store(squares + pair, tl.sum(low_square, axis=0), mask=in_pair)
    tl.store(squares + HALF + pair, tl.sum(high_square, axis=0), mask=in_pair)
    tl.store(squares + rest, tl.sum(rest_square, axis=0), mask=in_rest)
    if SUMS:
        tl.store(sums + pair, tl.sum(low_sum, axis=0), mask=in_pair)
        tl.store(sums + HALF + pair, tl.sum(high_sum, axis=0), mask=in_pair)
        tl.store(sums + rest, tl.sum(rest_sum, axis=0), mask=in_rest)
    if PEAKS:
        tl.store(peaks + pair, tl.max(low_peak, axis=0), mask=in_pair)
        tl.store(peaks + HALF + pair, tl.max(high_peak, axis=0), mask=in_pair)
        tl.store(peaks + rest, tl.max(rest_peak, axis=0), mask=in_rest)


@triton.jit
def _two_rows(row_ptr, stride, first, count, SIZE: tl.constexpr):
    channel = tl.arange(0, SIZE)
    even = tl.load(row_ptr + channel, mask=first < count, other=0.0)
    return even, tl.load(row_ptr + stride + channel, mask=first + 1 < count, other=0.0)


@triton.jit
def _inverse_rms(row, EPS: tl.constexpr, SIZE: tl.constexpr):
    x = row.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + EPS)


@triton.jit
def _normed(x_ptr, kept, inverse, weight, INTERPRETED: tl.constexpr):
    """``x * inverse * weight`` rounded to bf16, as fp32."""
    x = tl.load(x_ptr, mask=kept, other=0.0).to(tl.float32)
    return as_bf16(x * inverse * weight, INTERPRETED).to(tl.float32)
