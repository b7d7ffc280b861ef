"""Per-row 8-bit quantization, with an optional Hadamard rotation before it.

For each row of ``x`` of shape ``(M, K)``::

    amax  = clamp(max_k |x[k]|, AMAX_MIN, AMAX_MAX)
    scale = amax / format.max                     (fp32, true division)
    code  = clamp(x / scale, -max, max)           (true division, round to nearest even)

A row of zeros gets zero codes. Infinite values saturate at the largest finite fp32, so that they
come out of a product as infinity and touch no other row. A row that holds NaN gets zero codes and a
NaN scale, so that the whole row comes out as NaN.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from vllm_h3_quant.kernels.formats import BY_NAME, FP8, CodeFormat
from vllm_h3_quant.kernels.hadamard import hadamard_block, hadamard_reference

AMAX_MIN = 1e-30
"""Keeps every scale a normal fp32 number: GPUs may flush smaller ones to zero."""
AMAX_MAX = float(torch.finfo(torch.float32).max)


def quantize_rows(
    x: torch.Tensor,
    fmt: CodeFormat,
    *,
    rotation: int = 0,
    scale: torch.Tensor | None = None,
    padded: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each row of ``x``.

    Args:
        x: ``(M, K)`` floating point, any strides.
        fmt: the code format.
        rotation: width of the Hadamard groups, 0 for none.
        scale: ``(M, 1)`` fp32 scales to use; computed from ``x`` when None.
        padded: width of the codes, at least K; the columns past K are zero.

    Returns:
        ``(M, padded or K)`` contiguous codes and ``(M, 1)`` fp32 scales.
    """
    if scale is None:
        return _quantize_rows_op(x, fmt.name, rotation, padded or x.shape[1])
    return _implementation(x)(x, fmt, rotation=rotation, scale=scale, padded=padded)


def _implementation(x: torch.Tensor) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    return quantize_rows_triton if x.is_cuda else quantize_rows_reference


# An operator of its own, so that torch.compile sees one node with known shapes.
@torch.library.custom_op(
    "h3_quant::quantize_rows",
    mutates_args=(),
    schema="(Tensor x, str fmt, SymInt rotation, SymInt padded) -> (Tensor, Tensor)",
)
def _quantize_rows_op(x: torch.Tensor, fmt: str, rotation: int, padded: int) -> tuple[torch.Tensor, torch.Tensor]:
    return _implementation(x)(x, BY_NAME[fmt], rotation=rotation, padded=padded)


@_quantize_rows_op.register_fake
def _(x: torch.Tensor, fmt: str, rotation: int, padded: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = x.shape[0]
    return x.new_empty(rows, padded, dtype=BY_NAME[fmt].dtype), x.new_empty(rows, 1, dtype=torch.float32)


def row_scales(x: torch.Tensor, fmt: CodeFormat, *, rotation: int = 0) -> torch.Tensor:
    """The ``(M, 1)`` fp32 scales that :func:`quantize_rows` would use, without the codes."""
    rotated = hadamard_reference(x, rotation) if rotation else x
    amax = rotated.abs().amax(dim=-1, keepdim=True).float()
    # By a tensor: PyTorch turns a division by a number into a product with its reciprocal on a GPU.
    return amax.clamp(AMAX_MIN, AMAX_MAX) / torch.full_like(amax, fmt.max)


def quantize_rows_reference(
    x: torch.Tensor,
    fmt: CodeFormat,
    *,
    rotation: int = 0,
    scale: torch.Tensor | None = None,
    padded: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`quantize_rows` in plain PyTorch."""
    rows, width = x.shape
    y = hadamard_reference(x, rotation) if rotation else x.float()
    if scale is None:
        scale = row_scales(y, fmt)
    q = torch.nan_to_num(y / scale, nan=0.0).clamp(-fmt.max, fmt.max)
    q = torch.where(scale.isnan(), 0.0, q)
    if fmt.dtype is torch.int8:
        q = q.round()
    codes = torch.zeros(rows, padded or width, dtype=fmt.dtype, device=x.device)
    codes[:, :width] = q.to(fmt.dtype)
    return codes, scale


def quantize_rows_triton(
    x: torch.Tensor,
    fmt: CodeFormat,
    *,
    rotation: int = 0,
    scale: torch.Tensor | None = None,
    padded: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`quantize_rows` as one Triton launch: a program a row, two sweeps, the second from cache."""
    rows, width = x.shape
    if rotation and width % rotation:
        raise ValueError(f"Hadamard group {rotation} must be a power of two that divides {width}")
    out_width = padded or width
    codes = torch.empty(rows, out_width, dtype=fmt.dtype, device=x.device)
    given = scale is not None
    if scale is None:
        scale = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    if rows:
        _quantize_rows_kernel[(rows,)](
            x,
            codes,
            scale,
            x.stride(0),
            x.stride(1),
            width,
            out_width,
            MAX=fmt.max,
            AMAX_MIN=AMAX_MIN,
            AMAX_MAX=AMAX_MAX,
            FP8=fmt is FP8,
            SCALE_GIVEN=given,
            LEVELS=max(rotation.bit_length() - 1, 0),
            NORM=rotation**-0.5 if rotation else 1.0,
            BLOCK=max(rotation, min(4096, triton.next_power_of_2(width))),
            EMULATE_E4M3=triton.knobs.runtime.interpret,
            num_warps=8,
        )
    return codes, scale


@triton.jit
def _load_block(row_ptr, stride_k, columns, width, LEVELS: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr):
    x = tl.load(row_ptr + columns.to(tl.int64) * stride_k, mask=columns < width, other=0.0).to(tl.float32)
    if LEVELS:
        x = hadamard_block(x, LEVELS, BLOCK, NORM)
    return x


@triton.jit
def _round_to_e4m3(x):
    """Nearest e4m3 value, ties to even, as fp32. GPUs do this in the conversion; the interpreter truncates."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) & -0x100000
    # Below 2^-6 the values are 2^-9 apart: 1.5 * 2^23 * 2^-9 rounds to that step.
    subnormal = ((tl.abs(x) + 24576.0) - 24576.0).to(tl.int32, bitcast=True)
    rounded = tl.where(tl.abs(x) < 0.015625, subnormal, normal)
    return (rounded | (bits & -0x80000000)).to(tl.float32, bitcast=True)


@triton.jit
def _quantize_rows_kernel(
    x_ptr,
    codes_ptr,
    scale_ptr,
    stride_m,
    stride_k,
    width,
    out_width,
    MAX: tl.constexpr,
    AMAX_MIN: tl.constexpr,
    AMAX_MAX: tl.constexpr,
    FP8: tl.constexpr,
    SCALE_GIVEN: tl.constexpr,
    LEVELS: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    EMULATE_E4M3: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = x_ptr + row * stride_m
    if SCALE_GIVEN:
        scale = tl.load(scale_ptr + row)
    else:
        amax = tl.zeros((), dtype=tl.float32)
        holds_nan = tl.zeros((), dtype=tl.int32)
        for start in range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            x = _load_block(row_ptr, stride_k, columns, width, LEVELS, NORM, BLOCK)
            is_nan = x != x
            amax = tl.maximum(amax, tl.max(tl.where(is_nan, 0.0, tl.abs(x)), axis=0))
            holds_nan = tl.maximum(holds_nan, tl.max(is_nan.to(tl.int32), axis=0))
        amax = tl.minimum(tl.maximum(amax, AMAX_MIN), AMAX_MAX)
        scale = tl.where(holds_nan > 0, float("nan"), tl.div_rn(amax, MAX))
        tl.store(scale_ptr + row, scale)
    for start in range(0, out_width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = _load_block(row_ptr, stride_k, columns, width, LEVELS, NORM, BLOCK)
        q = tl.div_rn(x, scale)
        q = tl.where(q != q, 0.0, q)
        q = tl.minimum(tl.maximum(q, -MAX), MAX)
        if not FP8:
            # Adding and taking away 1.5 * 2^23 rounds to the nearest even integer.
            q = (q + 12582912.0) - 12582912.0
        elif EMULATE_E4M3:
            q = _round_to_e4m3(q)
        codes = q.to(codes_ptr.dtype.element_ty)
        tl.store(codes_ptr + row * out_width + columns, codes, mask=columns < out_width)
