"""RMSNorm with the affine transform of AdaLN, and the gated residual before it, to codes.

For a row of ``H`` bf16 values with AdaLN vectors ``i = indices[row]``::

    x      = residual + gate[i] * branch              rounded to bf16, where there is a gate
    h      = x / sqrt(mean(x^2) + eps) * weight * (1 + scale[i]) + shift[i]      rounded to bf16
    codes  = quantize_rows(h)

Sums are in fp32. Bit identity with vLLM-Omni's ``rms_norm_indexed_scale_shift`` needs its order of additions. Its
program has 256 threads, each of which adds the squares of eight neighbours, then of the eight that lie 2048 further,
and so on; then threads ``t`` and ``t ^ 16`` are added, ``t ^ 8``, 4, 2, 1, and warps ``w`` and ``w ^ 4``, 2, 1. Here a
thread stands for two of those: 16 neighbours, which is what codes and rotation want, in tiles that fit the row.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from vllm_h3_quant.kernels.encode import as_bf16
from vllm_h3_quant.kernels.formats import BY_NAME
from vllm_h3_quant.kernels.hadamard import split_columns
from vllm_h3_quant.kernels.quantize import quantize_row, row_constants
from vllm_h3_quant.kernels.rows import QuantizedRows, RowFormat

_PLAIN_THREADS = 256
_PLAIN_NEIGHBOURS = 8
"""Threads of the plain kernel, and values that follow each other in one; fewer where a row has less than 2048."""
THREADS = _PLAIN_THREADS // 2
_REGISTERS = 80
"""A thread: 24 warps run at once on a multiprocessor."""


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
    first, second, neighbours = tiles_of(hidden)
    _modulate_kernel[(rows,)](
        x, branch, updated, gate, shift, scale, weight, indices, codes, scales,
        x.stride(0), branch.stride(0), gate.stride(0), shift.stride(0), scale.stride(0), indices.stride(0),
        HIDDEN=hidden, EPS=eps, GATED=gated, FIRST=first, SECOND=second, THREADS=THREADS, NEIGHBOURS=neighbours,
        **row_constants(BY_NAME[fmt], rotation), num_warps=THREADS // 32, maxnreg=_REGISTERS,
    )  # fmt: skip


def tiles_of(hidden: int) -> tuple[int, int, int]:
    """Elements of the first tile and of the second (0 for none), and how many of them follow each other in a thread."""
    whole = max(triton.next_power_of_2(hidden), _PLAIN_THREADS)
    neighbours = 2 * min(whole // _PLAIN_THREADS, _PLAIN_NEIGHBOURS)
    half, rest = whole // 2, max(whole // 4, THREADS * neighbours)
    # The interpreter adds like NumPy, over a whole row.
    one = triton.knobs.runtime.interpret or half < rest or half + rest < hidden
    return (whole, 0, neighbours) if one else (half, rest, neighbours)


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
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    THREADS: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
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
    vector = tl.load(indices_ptr + row * indices_stride)
    x_row, branch_row, updated_row = (
        x_ptr + row * x_stride,
        branch_ptr + row * branch_stride,
        updated_ptr + row * HIDDEN,
    )
    gate_row, shift_row = gate_ptr + vector * gate_stride, shift_ptr + vector * shift_stride
    scale_row = scale_ptr + vector * scale_stride
    first = _residual(x_row, branch_row, updated_row, gate_row, 0, HIDDEN, GATED, FIRST, INTERPRETED)
    if INTERPRETED:
        total = tl.sum(first * first, axis=0)
    else:
        zero = tl.zeros([THREADS], tl.float32)
        chains = _add_squares((zero, zero), first, FIRST, THREADS, NEIGHBOURS)
        if SECOND:
            second = _residual(x_row, branch_row, updated_row, gate_row, FIRST, HIDDEN, GATED, SECOND, INTERPRETED)
            chains = _add_squares(chains, second, SECOND, THREADS, NEIGHBOURS)
        total = _sum_chains(chains, THREADS)
    inverse = tl.rsqrt(total / HIDDEN + EPS)
    first = _modulated(first, inverse, weight_ptr, shift_row, scale_row, 0, HIDDEN, FIRST, INTERPRETED)
    if SECOND:
        second = _modulated(second, inverse, weight_ptr, shift_row, scale_row, FIRST, HIDDEN, SECOND, INTERPRETED)
    else:
        second = first
    quantize_row(
        first, second, codes_ptr + row * HIDDEN, scales_ptr + row, scales_ptr, HIDDEN,
        MAX, AMAX_MIN, AMAX_MAX, FP8, False, OUTER, INNER, NORM, FIRST, SECOND, INTERPRETED, NEIGHBOURS,
    )  # fmt: skip


@triton.jit
def _residual(
    x_row,
    branch_row,
    updated_row,
    gate_row,
    start,
    HIDDEN: tl.constexpr,
    GATED: tl.constexpr,
    TILE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """A tile of the residual stream, updated and written where GATED; fp32, rounded to bf16."""
    column = start + tl.arange(0, TILE)
    inside = column < HIDDEN
    x = tl.load(x_row + column, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        gate = tl.load(gate_row + column, mask=inside, other=0.0).to(tl.float32)
        branch = tl.load(branch_row + column, mask=inside, other=0.0).to(tl.float32)
        updated = as_bf16(x + gate * branch, INTERPRETED)
        tl.store(updated_row + column, updated, mask=inside)
        x = updated.to(tl.float32)
    return x


@triton.jit
def _add_squares(chains, x, TILE: tl.constexpr, THREADS: tl.constexpr, NEIGHBOURS: tl.constexpr):
    """``chain + x[0]^2 + x[1]^2 + ...`` one after the other over either half of each thread's neighbours, and then over
    those that lie THREADS * NEIGHBOURS further, until the end of the tile."""
    REPEATS: tl.constexpr = TILE // (THREADS * NEIGHBOURS)
    HALF: tl.constexpr = NEIGHBOURS // 2
    columns = split_columns(tl.reshape(x, (REPEATS * THREADS, NEIGHBOURS)), REPEATS * THREADS, NEIGHBOURS)
    first = chains[0]
    second = chains[1]
    for repeat in tl.static_range(REPEATS):
        for i in tl.static_range(HALF):
            a = split_columns(tl.permute(tl.reshape(columns[i], (REPEATS, THREADS)), (1, 0)), THREADS, REPEATS)
            b = split_columns(tl.permute(tl.reshape(columns[HALF + i], (REPEATS, THREADS)), (1, 0)), THREADS, REPEATS)
            first += a[repeat] * a[repeat]
            second += b[repeat] * b[repeat]
    return first, second


@triton.jit
def _sum_chains(chains, THREADS: tl.constexpr):
    """The sum over the plain kernel's threads: by halves of each of its warps, then of the program. Additions of two
    values have no order, so that each level is written as one."""
    WARPS: tl.constexpr = THREADS // 16
    warps = tl.sum(tl.reshape(chains[0], (WARPS, 16)), axis=1) + tl.sum(tl.reshape(chains[1], (WARPS, 16)), axis=1)
    warps = tl.sum(tl.reshape(warps, (2, WARPS // 2)), axis=0)
    warps = tl.sum(tl.reshape(warps, (2, WARPS // 4)), axis=0)
    return tl.sum(warps, axis=0)


@triton.jit
def _modulated(
    x, inverse, weight_ptr, shift_row, scale_row, start, HIDDEN: tl.constexpr, TILE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """``x * inverse * weight * (1 + scale) + shift`` as bf16."""
    column = start + tl.arange(0, TILE)
    inside = column < HIDDEN
    normed = x * inverse * tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(shift_row + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(scale_row + column, mask=inside, other=0.0).to(tl.float32)
    return as_bf16(normed * (1.0 + scale) + shift, INTERPRETED)
