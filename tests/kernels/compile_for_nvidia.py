"""Compile the Triton kernels to machine code for a compute capability; prints one line a kernel.

    python compile_for_nvidia.py 90

A process of its own: kernels decorated for the interpreter cannot be compiled.
"""

from __future__ import annotations

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm_h3_quant.kernels import gemm_triton, quantize
from vllm_h3_quant.kernels.formats import FP8, INT8, CodeFormat
from vllm_h3_quant.kernels.hadamard import factors


def main(capability: int) -> None:
    for fmt in (FP8, INT8):
        if fmt is FP8 and capability < 89:
            continue
        for rotation in (0, 256):
            ptx = compiled(quantize._quantize_rows_kernel, *quantize_arguments(fmt, rotation), capability)
            print("quantize", fmt.name, rotation, "div.rn.f32" in ptx, "div.full" in ptx)
        tile = gemm_triton.LARGE_SHARED_MEMORY if capability in (80, 90, 100) else gemm_triton.SMALL_SHARED_MEMORY
        ptx = compiled(gemm_triton._scaled_gemm_kernel, *gemm_arguments(fmt, tile), capability)
        print("gemm", fmt.name, "wgmma" in ptx, "mma" in ptx)


def compiled(kernel: Any, signature: dict[str, str], constants: dict[str, Any], warps: int, capability: int) -> str:
    names = list(kernel.arg_names)
    types = {name: signature.get(name, "constexpr") for name in names}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name, kind in signature.items() if kind != "i64"}
    source = ASTSource(kernel, types, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps}).asm["ptx"]


def quantize_arguments(fmt: CodeFormat, rotation: int) -> tuple[dict[str, str], dict[str, Any], int]:
    first, second, warps = quantize.tiles(5376, rotation)
    inner, outer = factors(rotation) if rotation else (1, 1)
    signature = {
        "x_ptr": "*bf16",
        "codes_ptr": "*fp8e4nv" if fmt is FP8 else "*i8",
        "scale_ptr": "*fp32",
        "divisor_ptr": "*fp32",
        "rows": "i64",
        "stride_m": "i32",
        "width": "i32",
        "out_width": "i32",
    }
    constants = {
        "stride_k": 1,
        "MAX": fmt.max,
        "AMAX_MIN": quantize.AMAX_MIN,
        "AMAX_MAX": quantize.AMAX_MAX,
        "FP8": fmt is FP8,
        "DIVISOR_GIVEN": False,
        "OUTER": outer,
        "INNER": inner,
        "NORM": quantize.rotation_norm(rotation),
        "FIRST": first,
        "SECOND": second,
        "PREFETCH": second > 0 and rotation > 0,
        "INTERPRETED": False,
    }
    return signature, constants, warps


def gemm_arguments(fmt: CodeFormat, tile: gemm_triton.Tile) -> tuple[dict[str, str], dict[str, Any], int]:
    code = "fp8e4nv" if fmt is FP8 else "i8"
    signature = {
        "a_desc": f"tensordesc<{code}[{tile.rows}, {tile.depth}]>",
        "b_desc": f"tensordesc<{code}[{tile.columns}, {tile.depth}]>",
        "out_desc": f"tensordesc<bf16[{tile.rows}, {tile.columns // 2}]>",
        "scale_a_ptr": "*fp32",
        "scale_b_ptr": "*fp32",
        "bias_ptr": "*bf16",
        "rows": "i32",
        "columns": "i32",
        "depth": "i32",
    }
    constants = {
        "HAS_BIAS": True,
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "DEPTH": tile.depth,
        "GROUP_ROWS": gemm_triton.GROUP_ROWS,
        "PROGRAMS": 132,
    }
    return signature, constants, tile.warps


if __name__ == "__main__":
    main(int(sys.argv[1]))
