"""What attention's operands are shifted and multiplied by before they become codes.

For each document and head, over the document's tokens, with ``rms`` and means for each channel::

    k_mean, v_mean                            removed: softmax does not see a constant added to a row of
                                              scores, and the mean of V comes back after the product
    balance  = sqrt(rms(q) / rms(k - k_mean))
    q_factor = 1 / balance,  k_factor = balance     q . k keeps its value

Without ``k_mean`` the codes of K spend their range on what all keys share (SageAttention, arXiv
2410.02367). ``balance`` is SmoothQuant's migration (arXiv 2211.10438) at the point where it is best here: after
the rotation that follows, errors are spread evenly over a head, so that the error of a score goes with
``sqrt(sum_c q_c^2 / b_c^2 * sum_c k_c^2 b_c^2)``, which is least, ``sum_c |q_c| |k_c|``, for this ``b``.

For the FP8 product of Q and K one divisor a head is all that the kernel takes. It is a bound of the rotated
values that needs no second pass: ``|(x H)_i| <= sqrt(D) |x|``, and ``|x|^2`` is at most the sum of the squares of
each channel's largest magnitude, ``max |k| + |k_mean|`` for K. e4m3 has the same relative precision over 2^14, so
that a loose bound costs nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from vllm_h3_quant.kernels.attention.documents import SPAN_FIELDS, TILE_FIELDS, Documents
from vllm_h3_quant.kernels.attention.rotary import Rotary, sum_turned
from vllm_h3_quant.kernels.attention.sums import ROWS, UNROLL, row_sums, store_value_sums
from vllm_h3_quant.kernels.formats import FP8, CodeFormat
from vllm_h3_quant.kernels.quantize import AMAX_MIN

TINY = 1e-30
"""Mean square below which a channel counts as zero."""
MAX_BALANCE = 4096.0
"""Largest balance: a channel of Q alone or of K alone has nothing to be balanced with."""
_STEP = 64
"""Parts that one step of the second launch sums."""
_FIELDS = tl.constexpr(8)
"""Of a part: squares of Q; sums and squares of K; sum, smallest and largest of V; peaks of Q and of K."""


class Scaling(NamedTuple):
    """Shifts and factors of one packed sequence; fp32, ``(documents, heads, head_size)`` unless said otherwise.

    Attributes:
        q_factor, k_factor: multiply Q and the centred K before the rotation.
        k_mean, v_mean: means over the document.
        v_divisor: V's codes are ``(v - v_mean) / v_divisor``. One value a head where ``by_head``.
        q_divisor, k_divisor: ``(documents, heads)``, of the rotated values, where ``by_head``; else empty.
    """

    q_factor: torch.Tensor
    k_factor: torch.Tensor
    k_mean: torch.Tensor
    v_mean: torch.Tensor
    v_divisor: torch.Tensor
    q_divisor: torch.Tensor
    k_divisor: torch.Tensor


def scaling_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents, *, v_format: CodeFormat, by_head: bool
) -> Scaling:
    """:func:`scaling_triton` in plain PyTorch, with sums in fp64."""
    rows = [_document(q, k, v, span, v_format, by_head) for span in _token_ranges(documents)]
    return Scaling(*(torch.stack(field) for field in zip(*rows, strict=True)))


def _token_ranges(documents: Documents) -> list[slice]:
    ranges, begin = [], 0
    for length in documents.spans[:, 2].tolist():
        ranges.append(slice(begin, begin + length))
        begin += length
    return ranges


def _document(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tokens: slice, v_format: CodeFormat, by_head: bool
) -> tuple[torch.Tensor, ...]:
    _, heads, size = q.shape
    if tokens.start == tokens.stop:
        one, zero = torch.ones(heads, size, device=q.device), torch.zeros(heads, size, device=q.device)
        least = torch.full_like(one, AMAX_MIN / v_format.max)
        head = torch.full((heads if by_head else 0,), AMAX_MIN / FP8.max, device=q.device)
        return one, one, zero, zero, least, head, head
    q64, k64, v64 = (x[tokens].double() for x in (q, k, v))
    k_mean, v_mean = k64.mean(0), v64.mean(0)
    ratio = (q64.square().mean(0) + TINY) / ((k64 - k_mean).square().mean(0) + TINY)
    balance = ratio.sqrt().sqrt().clamp(1 / MAX_BALANCE, MAX_BALANCE)
    v_amax = (v64 - v_mean).abs().amax(0)
    if by_head:
        v_amax = v_amax.amax(-1, keepdim=True).expand(heads, size)
        q_peak, k_peak = q64.abs().amax(0) / balance, (k64.abs().amax(0) + k_mean.abs()) * balance
        q_divisor, k_divisor = (
            (peak.norm(dim=-1) * size**0.5).clamp(min=AMAX_MIN).float() / FP8.max for peak in (q_peak, k_peak)
        )
    else:
        q_divisor = k_divisor = q.new_empty(0, dtype=torch.float32)
    v_divisor = v_amax.clamp(min=AMAX_MIN).float() / v_format.max
    return (1 / balance).float(), balance.float(), k_mean.float(), v_mean.float(), v_divisor, q_divisor, k_divisor


def scaling_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: Documents,
    *,
    v_format: CodeFormat,
    by_head: bool,
    rotary: Rotary | None = None,
) -> Scaling:
    """The scaling of packed ``(tokens, heads, head_size)`` operands.

    Two launches: sums and extremes of each tile, then of each document. The order of the additions
    does not depend on how programs run, so the result is the same each time.

    Args:
        q, k, v: any strides, the last one 1.
        documents: of the packed sequence.
        v_format: code format of V.
        by_head: for a kernel that takes one divisor a head for each operand (FP8), instead of scales by token
            for Q and K and by channel for V.
        rotary: norm and rotation that Q and K still lack. Their scaling is of ``rotary.rows``, which are written.
    """
    _, heads, size = q.shape
    tiles, count = documents.tiles.shape[0], documents.spans.shape[0]
    new: dict[str, Any] = {"dtype": torch.float32, "device": q.device}
    parts = torch.empty(tiles, heads, _FIELDS.value, size, **new)
    if rotary is not None:
        sum_turned(q, k, v, documents, rotary, parts, peaks=by_head)
    else:
        _part_kernel[(tiles, heads, 3)](
            q, k, v, documents.tiles, parts,
            *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
            heads, PEAKS=by_head, SIZE=size, FIELDS=_FIELDS, ROWS=ROWS, UNROLL=UNROLL, num_warps=1,
        )  # fmt: skip
    by_channel = torch.empty(5, count, heads, size, **new)
    divisors = torch.empty(2, count, heads if by_head else 0, **new)
    _document_kernel[(count, heads)](
        parts, documents.spans, *by_channel.unbind(0), *divisors.unbind(0),
        heads, v_format.max, FP8.max, AMAX_MIN, TINY, MAX_BALANCE,
        PEAKS=by_head, STEP=_STEP, SIZE=size, FIELDS=_FIELDS, num_warps=8,
    )  # fmt: skip
    return Scaling(*by_channel.unbind(0), *divisors.unbind(0))


@triton.jit
def _part_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    tiles_ptr,
    parts_ptr,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    heads,
    PEAKS: tl.constexpr,
    SIZE: tl.constexpr,
    FIELDS: tl.constexpr,
    ROWS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    tile = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    operand = tl.program_id(2)
    first = tl.load(tiles_ptr + tile * TILE_FIELDS + 1).to(tl.int64)
    count = tl.load(tiles_ptr + tile * TILE_FIELDS + 2)
    filled = count > 0
    channel = tl.arange(0, SIZE)
    fields = parts_ptr + (tile.to(tl.int64) * heads + head) * FIELDS * SIZE
    part = fields + channel
    if operand == 0:
        source = q_ptr + first * q_token + head * q_head + channel
        _, square, _, peak = row_sums(source, q_token, count, False, PEAKS, SIZE, ROWS, UNROLL)
        tl.store(part, tl.sum(square, axis=0), mask=filled)
        if PEAKS:
            tl.store(part + 6 * SIZE, tl.max(peak, axis=0), mask=filled)
    elif operand == 1:
        source = k_ptr + first * k_token + head * k_head + channel
        total, square, _, peak = row_sums(source, k_token, count, False, PEAKS, SIZE, ROWS, UNROLL)
        tl.store(part + SIZE, tl.sum(total, axis=0), mask=filled)
        tl.store(part + 2 * SIZE, tl.sum(square, axis=0), mask=filled)
        if PEAKS:
            tl.store(part + 7 * SIZE, tl.max(peak, axis=0), mask=filled)
    else:
        values = v_ptr + first * v_token + head * v_head
        store_value_sums(values, v_token, count, fields + 3 * SIZE, filled, SIZE, ROWS, UNROLL)


@triton.jit
def _document_kernel(
    parts_ptr,
    spans_ptr,
    q_factor_ptr,
    k_factor_ptr,
    k_mean_ptr,
    v_mean_ptr,
    v_divisor_ptr,
    q_divisor_ptr,
    k_divisor_ptr,
    heads,
    v_max,
    fp8_max,
    amax_min,
    tiny,
    max_balance,
    PEAKS: tl.constexpr,
    STEP: tl.constexpr,
    SIZE: tl.constexpr,
    FIELDS: tl.constexpr,
):
    document = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(spans_ptr + document * SPAN_FIELDS)
    tiles = tl.load(spans_ptr + document * SPAN_FIELDS + 1)
    length = tl.maximum(tl.load(spans_ptr + document * SPAN_FIELDS + 2), 1).to(tl.float32)
    channel = tl.arange(0, SIZE)
    q_square = tl.zeros([SIZE], tl.float32)
    k_sum = tl.zeros([SIZE], tl.float32)
    k_square = tl.zeros([SIZE], tl.float32)
    v_sum = tl.zeros([SIZE], tl.float32)
    v_low = tl.full([SIZE], float("inf"), tl.float32)
    v_high = tl.full([SIZE], float("-inf"), tl.float32)
    q_peak = tl.zeros([SIZE], tl.float32)
    k_peak = tl.zeros([SIZE], tl.float32)
    for start in range(0, tiles, STEP):
        tile = (start + tl.arange(0, STEP))[:, None]
        kept = tile < tiles
        part = parts_ptr + ((first + tile).to(tl.int64) * heads + head) * FIELDS * SIZE + channel
        q_square += tl.sum(tl.load(part, mask=kept, other=0.0), axis=0)
        k_sum += tl.sum(tl.load(part + SIZE, mask=kept, other=0.0), axis=0)
        k_square += tl.sum(tl.load(part + 2 * SIZE, mask=kept, other=0.0), axis=0)
        v_sum += tl.sum(tl.load(part + 3 * SIZE, mask=kept, other=0.0), axis=0)
        v_low = tl.minimum(v_low, tl.min(tl.load(part + 4 * SIZE, mask=kept, other=float("inf")), axis=0))
        v_high = tl.maximum(v_high, tl.max(tl.load(part + 5 * SIZE, mask=kept, other=float("-inf")), axis=0))
        if PEAKS:
            q_peak = tl.maximum(q_peak, tl.max(tl.load(part + 6 * SIZE, mask=kept, other=0.0), axis=0))
            k_peak = tl.maximum(k_peak, tl.max(tl.load(part + 7 * SIZE, mask=kept, other=0.0), axis=0))
    k_mean = k_sum / length
    v_mean = v_sum / length
    k_variance = tl.maximum(k_square / length - k_mean * k_mean, 0.0)
    balance = tl.sqrt(tl.sqrt((q_square / length + tiny) / (k_variance + tiny)))
    balance = tl.minimum(tl.maximum(balance, 1 / max_balance), max_balance)
    v_amax = tl.where(tiles > 0, tl.maximum(v_high - v_mean, v_mean - v_low), 0.0)
    out = (document * heads + head) * SIZE + channel
    if PEAKS:
        v_amax = tl.zeros([SIZE], tl.float32) + tl.max(v_amax, axis=0)
        k_peak = (k_peak + tl.abs(k_mean)) * balance
        q_peak = q_peak / balance
        q_bound = tl.sqrt(tl.sum(q_peak * q_peak, axis=0) * SIZE)
        k_bound = tl.sqrt(tl.sum(k_peak * k_peak, axis=0) * SIZE)
        tl.store(q_divisor_ptr + document * heads + head, tl.maximum(q_bound, amax_min) / fp8_max)
        tl.store(k_divisor_ptr + document * heads + head, tl.maximum(k_bound, amax_min) / fp8_max)
    tl.store(q_factor_ptr + out, 1 / balance)
    tl.store(k_factor_ptr + out, balance)
    tl.store(k_mean_ptr + out, k_mean)
    tl.store(v_mean_ptr + out, v_mean)
    tl.store(v_divisor_ptr + out, tl.maximum(v_amax, amax_min) / v_max)
