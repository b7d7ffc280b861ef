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
from vllm_h3_quant.kernels.attention import codes, int8, mean, rotary, scaling, sums
from vllm_h3_quant.kernels.attention.documents import TILE
from vllm_h3_quant.kernels.formats import FP8, INT8, CodeFormat
from vllm_h3_quant.kernels.hadamard import factors
from vllm_h3_quant.kernels.producers import activation, modulate


def main(capability: int) -> None:
    for fmt in (FP8, INT8):
        if fmt is FP8 and capability < 89:
            continue
        for rotation in (0, 256):
            ptx = compiled(quantize._quantize_rows_kernel, *quantize_arguments(fmt, rotation), capability)
            print("quantize", fmt.name, rotation, "div.rn.f32" in ptx, "div.full" in ptx)
        # Half a minute a GPU for all of them, and code generation knows no GPU until late: one of them has all.
        for rotation in (0, 256) if capability == 90 else (256 if fmt is INT8 else 0,):
            producers(fmt, rotation, capability)
        tile = gemm_triton.LARGE_SHARED_MEMORY if capability in (80, 90, 100) else gemm_triton.SMALL_SHARED_MEMORY
        ptx = compiled(gemm_triton._scaled_gemm_kernel, *gemm_arguments(fmt, tile), capability)
        print("gemm", fmt.name, "wgmma" in ptx, "mma" in ptx)
    compiled(rotary._turn_kernel, *turn_arguments(), capability)
    v_format = FP8 if capability >= 89 else INT8
    for size in (64, 128):
        ptx = compiled(codes._codes_kernel, *codes_arguments(v_format, size), capability, enable_fp_fusion=False)
        print("codes", size, "fma.rn.f32" in ptx)
        compiled(scaling._part_kernel, *part_arguments(size), capability)
        arguments = attention_arguments(v_format, size, descriptors=capability >= 90)
        binary = compiled_whole(int8._int8_attention_kernel, *arguments, capability, num_stages=int8.STAGES)
        ptx = binary.asm["ptx"]
        found = [word in ptx for word in ("wgmma", "cp.async", "shfl.sync.idx")]
        print("attention", size, binary.metadata.shared, *found)


def compiled(
    kernel: Any, signature: dict[str, str], constants: dict[str, Any], warps: int, capability: int, **options: Any
) -> str:
    return compiled_whole(kernel, signature, constants, warps, capability, **options).asm["ptx"]


def compiled_whole(
    kernel: Any, signature: dict[str, str], constants: dict[str, Any], warps: int, capability: int, **options: Any
) -> Any:
    names = list(kernel.arg_names)
    types = {name: signature.get(name, "constexpr") for name in names}
    aligned = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name, kind in signature.items()
        if kind not in ("i64", "fp32") and name not in ("heads", "tokens")
    }
    source = ASTSource(kernel, types, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps, **options})


def producers(fmt: CodeFormat, rotation: int, capability: int) -> None:
    out = {"codes_ptr": "*fp8e4nv" if fmt is FP8 else "*i8", "scale_ptr": "*fp32", "scales_ptr": "*fp32"}
    row = {**quantize.row_constants(fmt, rotation), "INTERPRETED": False}
    first, second, neighbours = modulate.tiles_of(5376)
    kernels = (
        (
            modulate._modulate_kernel,
            {"HIDDEN": 5376, "EPS": 1e-5, "GATED": True, "FIRST": first, "SECOND": second}
            | {"THREADS": modulate.THREADS, "NEIGHBOURS": neighbours},
            modulate.THREADS // 32,
        ),
        (activation._swiglu_kernel, {"FIRST": 16384, "SECOND": 0}, 16),
        (mean._mean_codes_kernel, {"FIRST": 8192, "SECOND": 0}, 4),
    )
    for kernel, constants, warps in kernels:
        signature = {name: "i32" for name in kernel.arg_names if name.islower()}
        signature |= {name: "*bf16" for name in signature if name.endswith("_ptr")}
        signature |= {name: kind for name, kind in out.items() if name in signature}
        signature |= {name: kind for name, kind in (("indices_ptr", "*i64"), ("cu_ptr", "*i32")) if name in signature}
        compiled(kernel, signature, {**constants, **row}, warps, capability)
        print("producer", kernel.fn.__name__, fmt.name, rotation)


def part_arguments(size: int) -> tuple[dict[str, str], dict[str, Any], int]:
    strides = ("q_token", "q_head", "k_token", "k_head", "v_token", "v_head", "heads")
    signature = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), "*bf16") | {"tiles_ptr": "*i32"}
    constants = {
        "PEAKS": True,
        "SIZE": size,
        "FIELDS": scaling._FIELDS,
        "ROWS": sums.ROWS,
        "UNROLL": sums.UNROLL,
    }
    return signature | {"parts_ptr": "*fp32"} | dict.fromkeys(strides, "i32"), constants, 1


def turn_arguments() -> tuple[dict[str, str], dict[str, Any], int]:
    names = rotary._turn_kernel.arg_names
    signature = {name: "*bf16" if name.endswith("_ptr") else "i32" for name in names if name.islower()}
    signature |= {"tiles_ptr": "*i32", "parts_ptr": "*fp32"}
    constants = {
        "EPS": 1e-5,
        "HALF": 48,
        "PAIRS": 64,
        "REST": 32,
        "PEAKS": True,
        "SIZE": 128,
        "FIELDS": 8,
        "ROWS": sums.ROWS,
        "UNROLL": sums.UNROLL,
        "INTERPRETED": False,
    }
    return signature, constants, 1


def codes_arguments(v_format: CodeFormat, size: int) -> tuple[dict[str, str], dict[str, Any], int]:
    inner, outer = factors(size)
    signature = {name: "*fp32" for name in codes._codes_kernel.arg_names if name.endswith("_ptr")}
    signature |= dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), "*bf16") | {"tiles_ptr": "*i32"}
    signature |= {"q_out_ptr": "*i8", "k_out_ptr": "*i8", "v_out_ptr": "*fp8e4nv" if v_format is FP8 else "*i8"}
    for name in ("q_token", "q_head", "k_token", "k_head", "v_token", "v_head", "heads", "tokens", "slots"):
        signature[name] = "i32"
    constants = {
        "IN_SLOTS": True,
        "V_FP8": v_format is FP8,
        "TILE": TILE,
        "SIZE": size,
        "OUTER": outer,
        "INNER": inner,
        "INT8_MAX": INT8.max,
        "AMAX_MIN": quantize.AMAX_MIN,
        "INTERPRETED": False,
    }
    return signature, constants, 8


def attention_arguments(
    v_format: CodeFormat, size: int, *, descriptors: bool
) -> tuple[dict[str, str], dict[str, Any], int]:
    code = "fp8e4nv" if v_format is FP8 else "i8"
    blocks = {"q_codes": ("i8", int8.QUERIES, size), "k_codes": ("i8", TILE, size), "v_codes": (code, size, TILE)}
    signature = {
        name: f"tensordesc<{kind}[{rows}, {columns}]>" if descriptors else f"*{kind}"
        for name, (kind, rows, columns) in blocks.items()
    } | {
        "q_divisor_ptr": "*fp32",
        "k_divisor_ptr": "*fp32",
        "v_divisor_ptr": "*fp32",
        "v_mean_ptr": "*fp32",
        "out_ptr": "*bf16",
        "tiles_ptr": "*i32",
        "spans_ptr": "*i32",
        "scale": "fp32",
        "heads": "i32",
        "slots": "i32",
    }
    constants = {
        "LARGEST": 256.0,
        "LOG_LARGEST": 8.0,
        "FP8": v_format is FP8,
        "QUERIES": int8.QUERIES,
        "TILE": TILE,
        "SIZE": size,
        "DESCRIPTORS": descriptors,
        "INTERPRETED": False,
    }
    return signature, constants, int8.WARPS


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
