"""fp32 values to 8-bit codes inside Triton kernels, with the same bytes on a GPU and under the interpreter."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def encode(q, dtype: tl.constexpr, FP8: tl.constexpr, INTERPRETED: tl.constexpr):
    if FP8:
        if INTERPRETED:
            q = round_to_e4m3(q)
        code = q.to(dtype)
    else:
        # Adding 1.5 * 2^23 rounds to the nearest even integer and leaves it in the low bits.
        code = (q + 12582912.0).to(tl.int32, bitcast=True).to(dtype)
    return code


@triton.jit
def round_to_e4m3(x):
    """Nearest e4m3 value, ties to even, as fp32. GPUs do this in the conversion; the interpreter truncates."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) & -0x100000
    # Below 2^-6 the values are 2^-9 apart: 1.5 * 2^23 * 2^-9 rounds to that step.
    subnormal = ((tl.abs(x) + 24576.0) - 24576.0).to(tl.int32, bitcast=True)
    rounded = tl.where(tl.abs(x) < 0.015625, subnormal, normal)
    return (rounded | (bits & -0x80000000)).to(tl.float32, bitcast=True)


@triton.jit
def round_to_bf16(x, INTERPRETED: tl.constexpr):
    """Nearest bf16 value, ties to even, as fp32. The interpreter's conversion truncates."""
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
        rounded = tl.where(x != x, x, rounded)
    else:
        rounded = as_bf16(x, False).to(tl.float32)
    return rounded


@triton.jit
def as_bf16(x, INTERPRETED: tl.constexpr):
    """fp32 to bf16, two values an instruction; ``x.to(tl.bfloat16)`` takes one at a sixteenth of the rate of a
    multiplication where the result goes on as fp32. The interpreter truncates, as it does in the engine's kernels.
    """
    if INTERPRETED:
        code = x.to(tl.bfloat16)
    else:
        code = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    return code
