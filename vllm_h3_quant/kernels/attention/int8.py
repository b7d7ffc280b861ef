"""Attention over INT8 codes of Q and K, and FP8 or INT8 codes of V.

For each document and head, with the operands of :mod:`.codes` and ``D`` channels::

    s[i, j] = q_code[i] . k_code[j] * q_divisor[i] * k_divisor[tile of j] * softmax_scale * log2(e) / D
    p[i, j] = exp2(s[i, j] - m[i]) * largest,   m[i] the maximum of the row so far
    out[i]  = sum_j round8(p[i, j]) v_code[j] / sum_j p[i, j] * v_divisor + v_mean

Scores are exact in int32. An integer with ``|s| < 2^22`` added to the bits of ``1.5 * 2^23`` is that float plus the
integer, so the accumulator starts there, compares as it is, and becomes an exponent by one multiply-add. Each
product with V starts from zero and is added in fp32, because the matrix unit keeps fewer bits than fp32 in a long
FP8 sum. Slots past a document's end hold zero codes: they add nothing to the product, cannot be a row's maximum
beyond rounding (scores of a centred K average to zero), and their part of the sum is subtracted at the end.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from vllm_h3_quant.kernels.attention.codes import KEY_ORDER, SlotCodes
from vllm_h3_quant.kernels.attention.documents import SPAN_FIELDS, TILE, TILE_FIELDS, Documents
from vllm_h3_quant.kernels.attention.scaling import Scaling
from vllm_h3_quant.kernels.encode import encode
from vllm_h3_quant.kernels.formats import FP8

QUERIES = 64
"""Rows of a program: one warp group, of which three fit a multiprocessor of sm_90."""
WARPS = 4
STAGES = 2
_MAGIC = tl.constexpr(12582912.0)
_MAGIC_BITS = tl.constexpr(0x4B400000)
LARGEST_PROBABILITY = {torch.float8_e4m3fn: 256.0, torch.int8: 127.0}
"""What a row's maximum becomes before rounding: a power of two below the largest e4m3, or the largest INT8 code."""


def score_scale(softmax_scale: float, head_size: int) -> float:
    """What the product of two rotated operands is multiplied by to be an exponent of two."""
    return softmax_scale * math.log2(math.e) / head_size


def int8_attention_reference(
    codes: SlotCodes, scaling: Scaling, documents: Documents, softmax_scale: float, out_dtype: torch.dtype
) -> torch.Tensor:
    """:func:`int8_attention_triton` in plain PyTorch, tile by tile with the same running maximum."""
    heads, _, size = codes.q.shape
    out = torch.zeros(documents.tokens, heads, size, dtype=out_dtype, device=codes.q.device)
    scale = score_scale(softmax_scale, size)
    begin = 0
    for document, (first, tiles, length) in enumerate(documents.spans.tolist()):
        if not length:
            continue
        slots = slice(first * TILE, first * TILE + length)
        q = codes.q[:, slots].double() * (codes.q_divisor[:, slots, None].double() * scale)
        v = keys_in_order(codes.v[:, :, first * TILE : (first + tiles) * TILE])[:, :length].double()
        divisors = codes.k_divisor[:, first : first + tiles].repeat_interleave(TILE, dim=1)[:, :length, None]
        k = codes.k[:, slots].double() * divisors.double()
        product = running_softmax(q, k, v, codes.v.dtype)
        values = product * scaling.v_divisor[document, :, None].double() + scaling.v_mean[document, :, None].double()
        out[begin : begin + length] = values.transpose(0, 1).to(out_dtype)
        begin += length
    return out


def keys_in_order(v: torch.Tensor) -> torch.Tensor:
    """V's codes ``(heads, head_size, slots)`` as ``(heads, slots, head_size)`` in the order of the tokens, fp32."""
    heads, size, slots = v.shape
    place = torch.empty(16, dtype=torch.long, device=v.device)
    place[torch.tensor(KEY_ORDER, device=v.device)] = torch.arange(16, device=v.device)
    return v.float().view(heads, size, slots // 16, 16)[..., place].reshape(heads, size, slots).transpose(1, 2)


def running_softmax(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, codes: torch.dtype) -> torch.Tensor:
    """``softmax2(q k^T) v`` over :data:`TILE` keys at a time, with 8-bit probabilities.

    Args:
        q, k, v: ``(heads, rows, D)``, ``(heads, keys, D)`` twice, fp64; scores are exponents of two.
        codes: format of the probabilities before their product with V.
    """
    largest = LARGEST_PROBABILITY[codes]
    maximum = torch.full_like(q[..., :1], -1e30)
    total, out = torch.zeros_like(maximum), torch.zeros_like(q)
    for keys, values in zip(k.split(TILE, 1), v.split(TILE, 1), strict=True):
        scores = q @ keys.transpose(1, 2)
        new = torch.maximum(maximum, scores.amax(-1, keepdim=True))
        p = torch.exp2(scores - new) * largest
        rounded = p.float().to(codes).double() if codes.is_floating_point else p.round()
        decay = torch.exp2(maximum - new)
        out = out * decay + rounded @ values
        total = total * decay + p.sum(-1, keepdim=True)
        maximum = new
    return out / total


def int8_attention_triton(
    codes: SlotCodes,
    scaling: Scaling,
    documents: Documents,
    softmax_scale: float,
    out_dtype: torch.dtype,
    *,
    descriptors: bool | None = None,
) -> torch.Tensor:
    """``(tokens, heads, head_size)`` attention in one launch.

    Args:
        codes: of :func:`~vllm_h3_quant.kernels.attention.codes.slot_codes_triton`.
        scaling: that the codes were made with.
        documents: of the packed sequence; tokens past the last document are not written.
        softmax_scale: of the scores.
        out_dtype: bf16, fp16 or fp32.
        descriptors: whether blocks travel through tensor descriptors; where the GPU has TMA when None. Elsewhere
            Triton would wait for each of them, while it fetches plain loads ahead.
    """
    heads, slots, size = codes.q.shape
    if descriptors is None:
        descriptors = not codes.q.is_cuda or torch.cuda.get_device_capability(codes.q.device) >= (9, 0)
    q, k, v = codes.q.view(-1, size), codes.k.view(-1, size), codes.v.view(-1, slots)
    blocks = ([QUERIES, size], [TILE, size], [size, TILE])
    operands = [
        TensorDescriptor.from_tensor(x, block) if descriptors else x for x, block in zip((q, k, v), blocks, strict=True)
    ]
    out = torch.empty(documents.tokens, heads, size, dtype=out_dtype, device=codes.q.device)
    _int8_attention_kernel[(slots // QUERIES, heads)](
        *operands,
        codes.q_divisor,
        codes.k_divisor,
        scaling.v_divisor,
        scaling.v_mean,
        out,
        documents.tiles,
        documents.spans,
        score_scale(softmax_scale, size),
        heads,
        slots,
        LARGEST=LARGEST_PROBABILITY[codes.v.dtype],
        LOG_LARGEST=math.log2(LARGEST_PROBABILITY[codes.v.dtype]),
        FP8=codes.v.dtype is FP8.dtype,
        QUERIES=QUERIES,
        TILE=TILE,
        SIZE=size,
        DESCRIPTORS=descriptors,
        INTERPRETED=triton.knobs.runtime.interpret,
        num_warps=WARPS,
        num_stages=STAGES,
    )
    return out


@triton.jit
def _int8_attention_kernel(
    q_codes,
    k_codes,
    v_codes,
    q_divisor_ptr,
    k_divisor_ptr,
    v_divisor_ptr,
    v_mean_ptr,
    out_ptr,
    tiles_ptr,
    spans_ptr,
    scale,
    heads,
    slots,
    LARGEST: tl.constexpr,
    LOG_LARGEST: tl.constexpr,
    FP8: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    SIZE: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    CODE: tl.constexpr = tl.float8e4nv if FP8 else tl.int8
    first_slot = tl.program_id(0) * QUERIES
    head = tl.program_id(1)
    tile = first_slot // TILE
    start = first_slot % TILE
    document = tl.load(tiles_ptr + tile * TILE_FIELDS)
    count = tl.load(tiles_ptr + tile * TILE_FIELDS + 2)
    first = tl.load(spans_ptr + document * SPAN_FIELDS)
    # A block of rows without a token takes no step.
    steps = tl.where(start < count, tl.load(spans_ptr + document * SPAN_FIELDS + 1), 0)
    empty = steps * TILE - tl.load(spans_ptr + document * SPAN_FIELDS + 2)

    q = _block(q_codes, head * slots + first_slot, 0, SIZE, QUERIES, SIZE, DESCRIPTORS)
    row_scale = tl.load(q_divisor_ptr + head * slots + first_slot + tl.arange(0, QUERIES)) * scale
    k_divisors = k_divisor_ptr + head * (slots // TILE) + first
    maximum = tl.full([QUERIES], -1e30, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, SIZE], tl.float32)
    step_scale = row_scale
    shift = _MAGIC * row_scale
    for step in tl.range(0, steps):
        slot = (first + step) * TILE
        k = _block(k_codes, head * slots + slot, 0, SIZE, TILE, SIZE, DESCRIPTORS)
        biased = tl.dot(q, k.T, acc=tl.full([QUERIES, TILE], _MAGIC_BITS, tl.int32), out_dtype=tl.int32)
        # 22 significant bits, so that _MAGIC = 3 * 2^22 times it is exact.
        step_scale = row_scale * tl.load(k_divisors + step)
        step_scale = (step_scale.to(tl.int32, bitcast=True) & -4).to(tl.float32, bitcast=True)
        # Positive floats compare like their bits, and integers compare three at a time.
        largest = tl.max(biased, axis=1).to(tl.float32, bitcast=True) - _MAGIC
        new = tl.maximum(maximum, largest * step_scale)
        shift = (new - LOG_LARGEST) + _MAGIC * step_scale
        # What this step really subtracts: shift has been rounded, and the next step must count from there.
        new = (shift - _MAGIC * step_scale) + LOG_LARGEST
        p = tl.exp2(_exponent(biased.to(tl.float32, bitcast=True), step_scale[:, None], shift[:, None], INTERPRETED))
        decay = tl.exp2(maximum - new)
        total = total * decay + tl.sum(p, axis=1)
        maximum = new
        if not FP8:
            # The shift is rounded, so that the largest p may pass the largest code; e4m3 saturates.
            p = tl.minimum(p, LARGEST)
        codes = encode(p, CODE, FP8, INTERPRETED)
        # V's slots are in KEY_ORDER, and so are these.
        codes = tl.reshape(codes, (QUERIES, TILE // 16, 2, 4, 2))
        codes = tl.reshape(tl.permute(codes, (0, 1, 3, 2, 4)), (QUERIES, TILE))
        v = _block(v_codes, head * SIZE, slot, slots, SIZE, TILE, DESCRIPTORS)
        if FP8:
            acc = acc * decay[:, None] + tl.dot(codes, v.T)
        else:
            acc = acc * decay[:, None] + tl.dot(codes, v.T, out_dtype=tl.int32).to(tl.float32)

    of_empty = tl.exp2(_exponent(tl.full([QUERIES], _MAGIC, tl.float32), step_scale, shift, INTERPRETED))
    total = total - empty.to(tl.float32) * of_empty
    row = start + tl.arange(0, QUERIES)
    channel = tl.arange(0, SIZE)
    by_channel = (document * heads + head) * SIZE + channel
    out = acc / total[:, None] * tl.load(v_divisor_ptr + by_channel) + tl.load(v_mean_ptr + by_channel)
    token = tl.load(tiles_ptr + tile * TILE_FIELDS + 1).to(tl.int64) + row
    out_ptrs = out_ptr + (token[:, None] * heads + head) * SIZE + channel
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=(row < count)[:, None])


@triton.jit
def _block(codes, row, column, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DESCRIPTORS: tl.constexpr):
    """The ``(ROWS, COLUMNS)`` block of a matrix at ``(row, column)``."""
    if DESCRIPTORS:
        block = codes.load([row, column])
    else:
        rows = (row + tl.arange(0, ROWS)).to(tl.int64)
        block = tl.load(codes + rows[:, None] * stride + (column + tl.arange(0, COLUMNS)))
    return block


@triton.jit
def _exponent(biased, scale, shift, INTERPRETED: tl.constexpr):
    """``biased * scale - shift``, rounded once."""
    if INTERPRETED:
        # The interpreter has no fused multiply-add.
        exponent = (biased.to(tl.float64) * scale.to(tl.float64) - shift.to(tl.float64)).to(tl.float32)
    else:
        exponent = tl.fma(biased, scale, -shift)
    return exponent
