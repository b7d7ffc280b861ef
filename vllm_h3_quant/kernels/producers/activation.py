"""SwiGLU to codes.

For a row ``[gate, up]`` of ``2 F`` bf16 values::

    h     = bf16(silu(gate)) * up,  silu(g) = g / (1 + exp(-g)) in fp32       rounded to bf16
    codes = quantize_rows(h)

The engine's kernel takes CUDA's ``expf`` and a true division. Here both are approximate: rounded to bf16 the result is
the same for each of the 65,536 gates, which a test goes through on a GPU; the product that follows is rounded once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.language.extra import libdevice

from vllm_h3_quant.kernels.encode import as_bf16, round_to_bf16
from vllm_h3_quant.kernels.formats import BY_NAME, CodeFormat
from vllm_h3_quant.kernels.quantize import quantize_row, quantize_rows_reference, row_constants, tiles
from vllm_h3_quant.kernels.rows import QuantizedRows, RowFormat


def swiglu(x: torch.Tensor, row_format: RowFormat) -> QuantizedRows:
    """Codes of ``silu(gate) * up``.

    Args:
        x: ``(M, 2 F)``, gate and up beside each other, rows contiguous. Kernels take bf16.
        row_format: what the next linear takes.

    Returns:
        Rows of ``F`` codes.
    """
    codes, scale = _swiglu_op(x, *row_format)
    return QuantizedRows(codes, scale, x.dtype, row_format)


@torch.library.custom_op("h3_quant::swiglu", mutates_args=())
def _swiglu_op(x: torch.Tensor, fmt: str, rotation: int) -> tuple[torch.Tensor, torch.Tensor]:
    implementation = swiglu_triton if x.is_cuda and x.dtype is torch.bfloat16 else swiglu_reference
    return implementation(x, BY_NAME[fmt], rotation)


@_swiglu_op.register_fake
def _(x: torch.Tensor, fmt: str, rotation: int) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty(x, BY_NAME[fmt])


def _empty(x: torch.Tensor, fmt: CodeFormat) -> tuple[torch.Tensor, torch.Tensor]:
    rows, width = x.shape
    return x.new_empty(rows, width // 2, dtype=fmt.dtype), x.new_empty(rows, 1, dtype=torch.float32)


def swiglu_reference(x: torch.Tensor, fmt: CodeFormat, rotation: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of :func:`swiglu` in plain PyTorch."""
    gate, up = x.chunk(2, dim=-1)
    return quantize_rows_reference(F.silu(gate) * up, fmt, rotation=rotation)


def swiglu_triton(x: torch.Tensor, fmt: CodeFormat, rotation: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of :func:`swiglu` in one launch, which reads each row once."""
    rows, width = x.shape
    codes, scale = _empty(x, fmt)
    if rows:
        first, second, warps = tiles(width // 2, rotation)
        warps = min(2 * warps, 32)  # Measured on an H200: two operands a value need more threads than one.
        _swiglu_kernel[(rows,)](
            x, codes, scale, x.stride(0), width // 2,
            FIRST=first, SECOND=second, **row_constants(fmt, rotation), num_warps=warps,
        )  # fmt: skip
    return codes, scale


@triton.jit
def _swiglu_kernel(
    x_ptr,
    codes_ptr,
    scale_ptr,
    x_stride,
    width,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
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
    row_ptr = x_ptr + row * x_stride
    first = _swiglu_tile(row_ptr, 0, width, FIRST, INTERPRETED)
    if SECOND:
        second = _swiglu_tile(row_ptr, FIRST, width, SECOND, INTERPRETED)
    else:
        second = first
    quantize_row(
        first, second, codes_ptr + row * width, scale_ptr + row, scale_ptr, width,
        MAX, AMAX_MIN, AMAX_MAX, FP8, False, OUTER, INNER, NORM, FIRST, SECOND, INTERPRETED,
    )  # fmt: skip


@triton.jit
def _swiglu_tile(row_ptr, start, width, TILE: tl.constexpr, INTERPRETED: tl.constexpr):
    column = start + tl.arange(0, TILE)
    inside = column < width
    gate = tl.load(row_ptr + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(row_ptr + width + column, mask=inside, other=0.0).to(tl.float32)
    power = tl.exp(-gate)
    if INTERPRETED:
        silu = gate / (1.0 + power)
    else:
        # Both sides of the fraction by 2^-8, so that the fast reciprocal holds where 1 + power is beyond 2^126.
        silu = (gate * 0.00390625) * libdevice.fast_dividef(1.0, power * 0.00390625 + 0.00390625)
    silu = round_to_bf16(silu, INTERPRETED)
    return as_bf16(round_to_bf16(silu * up, INTERPRETED) if INTERPRETED else silu * up, INTERPRETED)
