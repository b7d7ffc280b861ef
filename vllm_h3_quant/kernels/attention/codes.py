"""8-bit codes of Q, K and V, straight out of the packed projections.

With the shifts and factors of :mod:`.scaling` and the Hadamard rotation ``H P`` of a head's dimension
(:mod:`vllm_h3_quant.kernels.hadamard`, not divided by ``sqrt(D)``)::

    y_q = (q * q_factor) H P        y_k = ((k - k_mean) * k_factor) H P        y_v = v - v_mean

``y_q . y_k = D * q . (k - k_mean)``, so attention divides its scores by ``D``. A code is ``y`` times the
rounded reciprocal of its divisor, rounded to the nearest even code. Multiplication and addition stay
apart (no fused multiply-add), so the same scaling gives the same bytes on every device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_h3_quant.kernels.attention.documents import TILE, TILE_FIELDS, Documents
from vllm_h3_quant.kernels.attention.scaling import Scaling
from vllm_h3_quant.kernels.encode import encode
from vllm_h3_quant.kernels.formats import FP8, INT8, CodeFormat
from vllm_h3_quant.kernels.hadamard import factors, hadamard_reference, join_columns, rotate_tile
from vllm_h3_quant.kernels.quantize import AMAX_MIN, amax_bits

KEY_ORDER = tuple(8 * (r >> 1 & 1) + 2 * (r >> 2 & 3) + (r & 1) for r in range(16))
"""Which of 16 tokens V's slot ``r`` holds. A thread of a matrix instruction gets scores of keys ``2c, 2c + 1,
2c + 8, 2c + 9`` and gives probabilities of keys ``4c`` to ``4c + 3``: with V in this order they are the same and
probabilities never travel between threads."""


_SLOT_REGISTERS = 80
"""Registers a thread: three programs run at once on a multiprocessor. At tokens it is faster without a limit."""


class SlotCodes(NamedTuple):
    """Codes in slots, with scales by token for Q, by tile for K and by channel for V.

    Attributes:
        q, k: ``(heads, slots, head_size)`` INT8.
        v: ``(heads, head_size, slots)`` FP8 or INT8, each 16 tokens in :data:`KEY_ORDER`.
        q_divisor: ``(heads, slots)`` fp32. Slots that hold no token have no meaning.
        k_divisor: ``(heads, tiles)`` fp32.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_divisor: torch.Tensor
    k_divisor: torch.Tensor


class TokenCodes(NamedTuple):
    """FP8 codes at their tokens, ``(tokens, heads, head_size)`` views of ``(heads, tokens, head_size)``.

    Their divisors are those of the scaling, one a document and head.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def slot_codes_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents, scaling: Scaling, v_format: CodeFormat
) -> SlotCodes:
    """:func:`slot_codes_triton` in plain PyTorch."""
    _, heads, size = q.shape
    tiles = documents.tiles.shape[0]
    y_q, y_k, y_v = _rotated(q, k, v, documents, scaling)
    q_amax, k_amax = y_q.abs().amax(-1), y_k.abs().amax((-2, -1))
    q_divisor, k_divisor = (amax.clamp(min=AMAX_MIN) / torch.full_like(amax, INT8.max) for amax in (q_amax, k_amax))
    order = torch.tensor(KEY_ORDER, device=v.device)
    v_codes = _encoded(y_v * _reciprocal(scaling.v_divisor)[_documents_of(documents), :, None], v_format)
    v_codes = v_codes.view(tiles, heads, TILE // 16, 16, size)[:, :, :, order].reshape(tiles, heads, TILE, size)
    return SlotCodes(
        q=_by_head(_encoded(y_q * _reciprocal(q_divisor)[..., None], INT8)),
        k=_by_head(_encoded(y_k * _reciprocal(k_divisor)[..., None, None], INT8)),
        v=_by_head(v_codes).transpose(1, 2).contiguous(),
        q_divisor=q_divisor.transpose(0, 1).reshape(heads, -1),
        k_divisor=k_divisor.t().contiguous(),
    )


def token_codes_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents, scaling: Scaling
) -> TokenCodes:
    """:func:`token_codes_triton` in plain PyTorch."""
    y_q, y_k, y_v = _rotated(q, k, v, documents, scaling)
    of = _documents_of(documents)
    divisors = (
        scaling.q_divisor[of, :, None, None],
        scaling.k_divisor[of, :, None, None],
        scaling.v_divisor[of, :, None],
    )
    outs = []
    for y, divisor in zip((y_q, y_k, y_v), divisors, strict=True):
        codes = torch.zeros(q.shape[1], q.shape[0], q.shape[2], dtype=FP8.dtype, device=q.device)
        filled = _encoded(y * _reciprocal(divisor), FP8)
        for tile, (_, token, count) in enumerate(documents.tiles.tolist()):
            codes[:, token : token + count] = filled[tile, :, :count]
        outs.append(codes.transpose(0, 1))
    return TokenCodes(*outs)


def _rotated(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents, scaling: Scaling
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``y_q, y_k, y_v`` as ``(tiles, heads, TILE, head_size)`` fp32, zero where a slot holds no token."""
    of = _documents_of(documents)
    size = q.shape[-1]
    row = torch.arange(TILE, device=q.device)
    held = row < documents.tiles[:, 2:3]
    token = torch.where(held, documents.tiles[:, 1:2] + row, 0).long()
    held = held[:, None, :, None]
    q, k, v = (x[token].float().transpose(1, 2) for x in (q, k, v))
    q = torch.where(held, q * scaling.q_factor[of, :, None], 0.0)
    k = torch.where(held, (k - scaling.k_mean[of, :, None]) * scaling.k_factor[of, :, None], 0.0)
    v = torch.where(held, v - scaling.v_mean[of, :, None], 0.0)
    return hadamard_reference(q, size), hadamard_reference(k, size), v


def _documents_of(documents: Documents) -> torch.Tensor:
    return documents.tiles[:, 0].long()


def _by_head(codes: torch.Tensor) -> torch.Tensor:
    tiles, heads, rows, size = codes.shape
    return codes.transpose(0, 1).reshape(heads, tiles * rows, size)


def _reciprocal(divisor: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(divisor) / divisor


def _encoded(y: torch.Tensor, fmt: CodeFormat) -> torch.Tensor:
    if fmt is FP8:
        # A quotient may pass the largest code by a rounding; PyTorch does not saturate.
        return y.clamp(-FP8.max, FP8.max).to(FP8.dtype)
    return y.round().to(fmt.dtype)


def slot_codes_triton(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents, scaling: Scaling, v_format: CodeFormat
) -> SlotCodes:
    """INT8 codes of Q and K and ``v_format`` codes of V in slots, in one launch.

    Args:
        q, k, v: ``(tokens, heads, head_size)``, any strides, the last one 1.
        documents: of the packed sequence.
        scaling: by token and channel (``by_head=False``).
        v_format: FP8 or INT8.
    """
    _, heads, size = q.shape
    tiles, slots = documents.tiles.shape[0], documents.slots
    codes = SlotCodes(
        torch.empty(heads, slots, size, dtype=torch.int8, device=q.device),
        torch.empty(heads, slots, size, dtype=torch.int8, device=q.device),
        torch.empty(heads, size, slots, dtype=v_format.dtype, device=q.device),
        torch.empty(heads, slots, dtype=torch.float32, device=q.device),
        torch.empty(heads, tiles, dtype=torch.float32, device=q.device),
    )
    _launch(q, k, v, documents, scaling, codes, in_slots=True, v_fp8=v_format is FP8)
    return codes


def token_codes_triton(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents, scaling: Scaling
) -> TokenCodes:
    """FP8 codes of Q, K and V at their tokens, in one launch. The scaling is by head."""
    tokens, heads, size = q.shape
    out = torch.empty(3, heads, tokens, size, dtype=FP8.dtype, device=q.device)
    codes = (*out.unbind(0), scaling.q_divisor, scaling.k_divisor)
    _launch(q, k, v, documents, scaling, codes, in_slots=False, v_fp8=True)
    return TokenCodes(*out.transpose(1, 2).unbind(0))


def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: Documents,
    scaling: Scaling,
    codes: tuple[torch.Tensor, ...],
    *,
    in_slots: bool,
    v_fp8: bool,
) -> None:
    _, heads, size = q.shape
    inner, outer = factors(size)
    _codes_kernel[(documents.tiles.shape[0], heads, 3)](
        q, k, v, documents.tiles, *scaling[:5], *codes,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        heads, documents.tokens, documents.slots,
        IN_SLOTS=in_slots, V_FP8=v_fp8, TILE=TILE, SIZE=size, OUTER=outer, INNER=inner,
        INT8_MAX=INT8.max, AMAX_MIN=AMAX_MIN, INTERPRETED=triton.knobs.runtime.interpret,
        num_warps=8, maxnreg=_SLOT_REGISTERS if in_slots else None, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def _codes_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    tiles_ptr,
    q_factor_ptr,
    k_factor_ptr,
    k_mean_ptr,
    v_mean_ptr,
    v_divisor_ptr,
    q_out_ptr,
    k_out_ptr,
    v_out_ptr,
    q_divisor_ptr,
    k_divisor_ptr,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    heads,
    tokens,
    slots,
    IN_SLOTS: tl.constexpr,
    V_FP8: tl.constexpr,
    TILE: tl.constexpr,
    SIZE: tl.constexpr,
    OUTER: tl.constexpr,
    INNER: tl.constexpr,
    INT8_MAX: tl.constexpr,
    AMAX_MIN: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    tile = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    operand = tl.program_id(2)
    document = tl.load(tiles_ptr + tile * TILE_FIELDS)
    token = tl.load(tiles_ptr + tile * TILE_FIELDS + 1).to(tl.int64)
    count = tl.load(tiles_ptr + tile * TILE_FIELDS + 2)
    row = tl.arange(0, TILE)
    channel = tl.arange(0, SIZE)
    by_document = document * heads + head
    by_channel = by_document * SIZE + channel
    if IN_SLOTS:
        out = (head * slots + tile.to(tl.int64) * TILE + row[:, None]) * SIZE + channel
        written = (row < TILE)[:, None]
    else:
        out = (head * tokens + token + row[:, None]) * SIZE + channel
        written = (row < count)[:, None]
    if operand == 2:
        if IN_SLOTS:
            # KEY_ORDER: the slot's token among its 16.
            row = (row & -16) + 8 * ((row >> 1) & 1) + 2 * ((row >> 2) & 3) + (row & 1)
        kept = (row < count)[:, None]
        v = tl.load(v_ptr + (token + row[:, None]) * v_token + head * v_head + channel, mask=kept, other=0.0)
        y = v.to(tl.float32) - tl.load(v_mean_ptr + by_channel)
        y = tl.where(kept, y, 0.0) * tl.div_rn(1.0, tl.load(v_divisor_ptr + by_channel))
        codes = encode(y, v_out_ptr.dtype.element_ty, V_FP8, INTERPRETED)
        if IN_SLOTS:
            slot = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
            tl.store(v_out_ptr + (head * SIZE + channel[:, None]) * slots + slot, tl.trans(codes))
        else:
            tl.store(v_out_ptr + out, codes, mask=written)
    elif operand == 1:
        kept = (row < count)[:, None]
        k = tl.load(k_ptr + (token + row[:, None]) * k_token + head * k_head + channel, mask=kept, other=0.0)
        k = (k.to(tl.float32) - tl.load(k_mean_ptr + by_channel)) * tl.load(k_factor_ptr + by_channel)
        ys = rotate_tile(tl.reshape(tl.where(kept, k, 0.0), (TILE * SIZE,)), TILE * SIZE, OUTER, INNER)
        if IN_SLOTS:
            amax = tl.max(amax_bits(ys, OUTER), axis=0).to(tl.float32, bitcast=True)
            divisor = tl.div_rn(_at_least(amax, AMAX_MIN), INT8_MAX)
            tl.store(k_divisor_ptr + head * (slots // TILE) + tile, divisor)
        else:
            divisor = tl.load(k_divisor_ptr + by_document)
        _store_rotated(ys, k_out_ptr + out, written, tl.div_rn(1.0, divisor), IN_SLOTS, TILE, SIZE, OUTER, INTERPRETED)
    else:
        kept = (row < count)[:, None]
        q = tl.load(q_ptr + (token + row[:, None]) * q_token + head * q_head + channel, mask=kept, other=0.0)
        q = q.to(tl.float32) * tl.load(q_factor_ptr + by_channel)
        ys = rotate_tile(tl.reshape(q, (TILE * SIZE,)), TILE * SIZE, OUTER, INNER)
        if IN_SLOTS:
            bits = tl.max(tl.reshape(amax_bits(ys, OUTER), (TILE, SIZE // OUTER)), axis=1)
            divisors = tl.div_rn(_at_least(bits.to(tl.float32, bitcast=True), AMAX_MIN), INT8_MAX)
            tl.store(q_divisor_ptr + head * slots + tile.to(tl.int64) * TILE + row, divisors)
            reciprocals = tl.broadcast_to(tl.div_rn(1.0, divisors)[:, None], (TILE, SIZE // OUTER))
            reciprocal = tl.reshape(reciprocals, (TILE * SIZE // OUTER,))
        else:
            reciprocal = tl.div_rn(1.0, tl.load(q_divisor_ptr + by_document))
        _store_rotated(ys, q_out_ptr + out, written, reciprocal, IN_SLOTS, TILE, SIZE, OUTER, INTERPRETED)


@triton.jit
def _at_least(amax, AMAX_MIN: tl.constexpr):
    """``max(amax, AMAX_MIN)``; NaN stays."""
    return tl.where(amax != amax, amax, tl.maximum(amax, AMAX_MIN))


@triton.jit
def _store_rotated(
    ys,
    out,
    written,
    reciprocal,
    INT8: tl.constexpr,
    TILE: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    codes = ()
    for i in tl.static_range(COLUMNS):
        codes = codes + (encode(ys[i] * reciprocal, out.dtype.element_ty, not INT8, INTERPRETED),)
    tl.store(out, tl.reshape(join_columns(codes, TILE * SIZE // COLUMNS, COLUMNS), (TILE, SIZE)), mask=written)
