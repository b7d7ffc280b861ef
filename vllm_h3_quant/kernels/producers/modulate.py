"""RMSNorm with the affine transform of AdaLN, and the gated residual before it, to codes.

For a row of ``H`` bf16 values with AdaLN vectors ``i = indices[row]``::

    x      = residual + gate[i] * branch              rounded to bf16, where there is a gate
    h      = x / sqrt(mean(x^2) + eps) * weight * (1 + scale[i]) + shift[i]      rounded to bf16
    codes  = quantize_rows(h)

Sums are in fp32. Bit identity with vLLM-Omni's ``rms_norm_indexed_scale_shift`` needs its order of additions,
which in Triton follows from the tile and the number of warps: one tile of the next power of two and eight warps,
with values that lie in it as bf16 loads leave them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from vllm_h3_quant.kernels.formats import BY_NAME
from vllm_h3_quant.kernels.quantize import quantize_row, row_constants
from vllm_h3_quant.kernels.rows import QuantizedRows, RowFormat

WARPS = 8
"""As many as the plain kernel has: they decide the order of a row's sum."""


def norm_modulate(
    x: torch.Tensor,
    weight: torch.Tensor,
    shift: torch.Tensor,
    scale: torch.Tensor,
    indices: torch.Tensor,
    eps: float,
    row_format: RowFormat,
) -> QuantizedRows:
    """Codes of the normed and modulated rows of ``x``.

    Args:
        x: ``(M, H)`` bf16 on a GPU, rows contiguous.
        weight: ``(H,)`` bf16.
        shift, scale: ``(vectors, H)`` bf16, rows contiguous.
        indices: ``(M,)`` integers below ``vectors``.
        eps: added to the mean square.
        row_format: what the next linear takes.
    """
    codes, scales = _norm_modulate_op(x, weight, shift, scale, indices, eps, *row_format)
    return QuantizedRows(codes, scales, x.dtype, row_format)


def gate_norm_modulate(
    residual: torch.Tensor,
    gate: torch.Tensor,
    branch: torch.Tensor,
    weight: torch.Tensor,
    shift: torch.Tensor,
    scale: torch.Tensor,
    indices: torch.Tensor,
    eps: float,
    row_format: RowFormat,
) -> tuple[torch.Tensor, QuantizedRows]:
    """The gated residual, and codes of its normed and modulated rows.

    Args:
        residual, branch: ``(M, H)`` bf16 on a GPU, rows contiguous.
        gate: ``(vectors, H)`` bf16, rows contiguous.
        weight, shift, scale, indices, eps, row_format: as for :func:`norm_modulate`.
    """
    updated, codes, scales = _gate_norm_modulate_op(
        residual, gate, branch, weight, shift, scale, indices, eps, *row_format
    )
    return updated, QuantizedRows(codes, scales, residual.dtype, row_format)


@torch.library.custom_op("h3_quant::norm_modulate", mutates_args=())
def _norm_modulate_op(
    x: torch.Tensor,
    weight: torch.Tensor,
    shift: torch.Tensor,
    scale: torch.Tensor,
    indices: torch.Tensor,
    eps: float,
    fmt: str,
    rotation: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scales = _empty_rows(x, fmt)
    _launch(x, x, shift, x, weight, shift, scale, indices, eps, codes, scales, fmt, rotation, gated=False)
    return codes, scales


@_norm_modulate_op.register_fake
def _(x: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty_rows(x, others[-2])


@torch.library.custom_op("h3_quant::gate_norm_modulate", mutates_args=())
def _gate_norm_modulate_op(
    residual: torch.Tensor,
    gate: torch.Tensor,
    branch: torch.Tensor,
    weight: torch.Tensor,
    shift: torch.Tensor,
    scale: torch.Tensor,
    indices: torch.Tensor,
    eps: float,
    fmt: str,
    rotation: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    updated = torch.empty_like(residual, memory_format=torch.contiguous_format)
    codes, scales = _empty_rows(residual, fmt)
    _launch(
        residual, updated, gate, branch, weight, shift, scale, indices, eps, codes, scales, fmt, rotation, gated=True
    )
    return updated, codes, scales


@_gate_norm_modulate_op.register_fake
def _(residual: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(residual, memory_format=torch.contiguous_format), *_empty_rows(residual, others[-2])


def _empty_rows(x: torch.Tensor, fmt: str) -> tuple[torch.Tensor, torch.Tensor]:
    rows, width = x.shape
    return x.new_empty(rows, width, dtype=BY_NAME[fmt].dtype), x.new_empty(rows, 1, dtype=torch.float32)


def _launch(
    x: torch.Tensor,
    updated: torch.Tensor,
    gate: torch.Tensor,
    branch: torch.Tensor,
    weight: torch.Tensor,
    shift: torch.Tensor,
    scale: torch.Tensor,
    indices: torch.Tensor,
    eps: float,
    codes: torch.Tensor,
    scales: torch.Tensor,
    fmt: str,
    rotation: int,
    *,
    gated: bool,
) -> None:
    rows, hidden = x.shape
    if not rows:
        return
    _modulate_kernel[(rows,)](
        x, branch, updated, gate, shift, scale, weight, indices, codes, scales,
        x.stride(0), branch.stride(0), gate.stride(0), shift.stride(0), scale.stride(0), indices.stride(0),
        HIDDEN=hidden, EPS=eps, GATED=gated, TILE=triton.next_power_of_2(hidden),
        **row_constants(BY_NAME[fmt], rotation), num_warps=WARPS,
    )  # fmt: skip


@triton.jit
def _modulate_kernel(
    x_ptr,
    branch_ptr,
    updated_ptr,
    gate_ptr,
    shift_ptr,
    scale_ptr,
    weight_ptr,
    indices_ptr,
    codes_ptr,
    scales_ptr,
    x_stride,
    branch_stride,
    gate_stride,
    shift_stride,
    scale_stride,
    indices_stride,
    HIDDEN: tl.constexpr,
    EPS: tl.constexpr,
    GATED: tl.constexpr,
    TILE: tl.constexpr,
    MAX: tl.constexpr,
    AMAX_MIN: tl.constexpr,
    AMAX_MAX: tl.constexpr,
    FP8: tl.constexpr,
    OUTER: tl.constexpr,
    INNER: tl.constexpr,
    NORM: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    inside = column < HIDDEN
    vector = tl.load(indices_ptr + row * indices_stride)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        gate = tl.load(gate_ptr + vector * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
        branch = tl.load(branch_ptr + row * branch_stride + column, mask=inside, other=0.0).to(tl.float32)
        updated = (x + gate * branch).to(tl.bfloat16)
        tl.store(updated_ptr + row * HIDDEN + column, updated, mask=inside)
        x = updated.to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, axis=0) / HIDDEN + EPS) * weight
    shift = tl.load(shift_ptr + vector * shift_stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + vector * scale_stride + column, mask=inside, other=0.0).to(tl.float32)
    modulated = (normed * (1.0 + scale) + shift).to(tl.bfloat16)
    quantize_row(
        modulated, modulated, codes_ptr + row * HIDDEN, scales_ptr + row, scales_ptr, HIDDEN,
        MAX, AMAX_MIN, AMAX_MAX, FP8, False, OUTER, INNER, NORM, TILE, 0, INTERPRETED,
    )  # fmt: skip
