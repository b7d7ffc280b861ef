"""Quantizing activations per token, beside vLLM's own kernels and a plain copy within the device.

A case is one input width of MiniMax-H3's linears and one number of tokens. GB/s counts the bf16 values
read and the codes and scales written, ``3 K + 4`` bytes a token; ``percent_of_copy`` sets it beside the
bandwidth of the copy measured in the same repetitions.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from harness.measure import Variant, copy_variant, measure
from harness.report import Row, report
from shapes import H3, parse_ranks, parse_rotations, parse_tokens, quantize_bytes

from vllm_h3_quant.kernels.formats import FP8, INT8
from vllm_h3_quant.kernels.quantize import quantize_rows


def main(
    tokens: Annotated[Any, typer.Option(parser=parse_tokens, metavar="N,4s,..", help="Tokens, or seconds.")] = "4s",
    rotation: Annotated[Any, typer.Option(parser=parse_rotations, metavar="G,..", help="Hadamard groups.")] = "256",
    tp: Annotated[Any, typer.Option(parser=parse_ranks, metavar="R,..", help="Tensor-parallel ranks.")] = "1",
    repeat: Annotated[int, typer.Option(min=1, help="Timed calls of each variant.")] = 30,
    csv: Annotated[Path | None, typer.Option(help="Append the rows to this file.")] = None,
) -> None:
    """Time per-token quantization at the input widths of MiniMax-H3's linears."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    widths = sorted({width for ranks in tp for width in H3.widths(ranks)})
    copy = copy_variant(device)
    for count in tokens:
        rows: list[Row] = []
        for k in widths:
            x = torch.randn(count, k, dtype=torch.bfloat16, device=device)
            variants = [copy, *ours(x, rotation), *vllm_kernels(x)]
            case = {"tokens": count, "k": k}
            rows += beside_copy(measure("quantize", case, variants, device=device, repetitions=repeat))
        report(rows, csv)


def ours(x: torch.Tensor, rotations: tuple[int, ...]) -> list[Variant]:
    """``quantize_rows`` in every form that a layer calls it in."""
    variants = [
        _variant("h3 fp8", partial(quantize_rows, x, FP8), x),
        _variant("h3 int8", partial(quantize_rows, x, INT8), x),
    ]
    for group in rotations:
        name = f"h3 int8, rotation {group}"
        if x.shape[1] % group:
            variants.append(Variant.missing(name, f"{group} does not divide {x.shape[1]} inputs"))
        else:
            variants.append(_variant(name, partial(quantize_rows, x, INT8, rotation=group), x))
    return variants


def vllm_kernels(x: torch.Tensor) -> list[Variant]:
    """vLLM's dynamic per-token kernels, where its CUDA extension is loaded."""
    kernels = {
        "vllm fp8": "dynamic_per_token_scaled_fp8_quant",
        "vllm int8": "dynamic_scaled_int8_quant",
    }
    if not x.is_cuda:
        return [Variant.missing(name, "vLLM's extension needs CUDA") for name in kernels]
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import _custom_ops
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    calls: dict[str, Callable[[], object]] = {
        "vllm fp8": partial(_custom_ops.scaled_fp8_quant, x, use_per_token_if_dynamic=True),
        "vllm int8": partial(_custom_ops.scaled_int8_quant, x),
    }
    return [
        _variant(name, calls[name], x)
        if hasattr(torch.ops._C, kernel)
        else Variant.missing(name, f"vLLM's extension has no {kernel}")
        for name, kernel in kernels.items()
    ]


def beside_copy(rows: list[Row]) -> list[Row]:
    """Each rate as a percentage of the first row's, which is the copy."""
    copied = rows[0].gb_s
    assert copied is not None
    return [
        row
        if row is rows[0] or row.gb_s is None
        else replace(row, extra={**row.extra, "percent_of_copy": 100 * row.gb_s / copied})
        for row in rows
    ]


def _variant(name: str, run: Callable[[], object], x: torch.Tensor) -> Variant:
    return Variant(name, run, bytes=quantize_bytes(*x.shape))


if __name__ == "__main__":
    typer.run(main)
