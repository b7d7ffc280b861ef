"""Compile the Triton kernels to machine code for a compute capability; prints one line a kernel.

    python compile_for_nvidia.py 90

A process of its own: kernels decorated for the interpreter cannot be compiled.
"""

from __future__ import annotations

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm_h3_quant.kernels import quantize
from vllm_h3_quant.kernels.formats import FP8, INT8


def main(capability: int) -> None:
    for fmt in (FP8, INT8):
        if fmt is FP8 and capability < 89:
            continue
        for rotation in (0, 256):
            signature = {
                "x_ptr": "*bf16",
                "codes_ptr": "*fp8e4nv" if fmt is FP8 else "*i8",
                "scale_ptr": "*fp32",
                "stride_m": "i64",
                "stride_k": "i32",
                "width": "i32",
                "out_width": "i32",
            }
            constants = {
                "MAX": fmt.max,
                "AMAX_MIN": quantize.AMAX_MIN,
                "AMAX_MAX": quantize.AMAX_MAX,
                "FP8": fmt is FP8,
                "SCALE_GIVEN": False,
                "LEVELS": rotation.bit_length() - 1 if rotation else 0,
                "NORM": rotation**-0.5 if rotation else 1.0,
                "BLOCK": 4096,
                "EMULATE_E4M3": False,
            }
            source = ASTSource(
                quantize._quantize_rows_kernel, {**signature, **dict.fromkeys(constants, "constexpr")}, constants
            )
            compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
            ptx = compiled.asm["ptx"]
            print(fmt.name, rotation, len(compiled.asm["cubin"]), "div.rn.f32" in ptx, "div.full" in ptx)


if __name__ == "__main__":
    main(int(sys.argv[1]))
