"""The four linears of a MiniMax-H3 block that run on every token, and the four in sequence.

All are real layers of the engine with quantization of the activations included: ``bf16`` (``F.linear``),
vLLM-Omni's ``fp8`` and ``int8``, and this package's methods. ``gemm`` rows are the product alone on
operands quantized beforehand, one row for each backend that serves the device. The relative error is that
of the output against the bf16 layer's, where inputs and weights have outlier channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from h3_layers import (
    LINEAR_METHODS,
    backends_here,
    check_methods,
    engine,
    kernel,
    linear_layer,
    outlier_input,
    outlier_weight,
    refusal,
    weight_mib,
)
from harness.measure import Variant, measure
from harness.report import Row, report
from shapes import H3, TINY, Linear, parse_ranks, parse_tokens

from vllm_h3_quant.config.schema import PRESETS, Method
from vllm_h3_quant.kernels.formats import FP8, INT8, CodeFormat
from vllm_h3_quant.kernels.hadamard import largest_group
from vllm_h3_quant.kernels.product import Product
from vllm_h3_quant.kernels.quantize import quantize_rows
from vllm_h3_quant.testing.numeric import relative_l2

SAMPLED_ROWS = 512
ROTATION = {FP8: 0, INT8: PRESETS[Method.INT8]["rotation"]}
"""The methods' defaults; a layer rotates in narrower groups where these do not divide its inputs."""


@dataclass(frozen=True)
class Contender:
    """One way to compute the linears of a rank on given inputs, or why it cannot be done here.

    Attributes:
        products: a call for each linear.
        extras: further columns for each linear.
        whole: further columns for all of them together.
    """

    name: str
    products: Sequence[Callable[[], torch.Tensor]] = ()
    extras: Sequence[Mapping[str, object]] = ()
    whole: Mapping[str, object] = field(default_factory=dict)
    unavailable: str | None = None


def main(
    tokens: Annotated[Any, typer.Option(parser=parse_tokens, metavar="N,4s,..", help="Tokens, or seconds.")] = "4s",
    tp: Annotated[Any, typer.Option(parser=parse_ranks, metavar="R,..", help="Tensor-parallel ranks.")] = "1",
    methods: Annotated[Any, typer.Option(parser=check_methods, metavar="M,..", help="Methods.")] = LINEAR_METHODS,
    gemm: Annotated[bool, typer.Option(help="Rows of the product alone.")] = True,
    tiny: Annotated[bool, typer.Option(help="Small layers, for a CPU.")] = False,
    repeat: Annotated[int, typer.Option(min=1, help="Timed calls of each variant.")] = 20,
    csv: Annotated[Path | None, typer.Option(help="Append the rows to this file.")] = None,
) -> None:
    """Time the four linears of a MiniMax-H3 block, quantization included."""
    with engine() as device:
        for ranks in tp:
            linears = [linear.shard(ranks) for linear in (TINY if tiny else H3).linears]
            weights = outlier_weights(linears, device)
            layers = {method: build(method, linears, weights, device) for method in methods}
            for count in tokens:
                with torch.inference_mode():
                    inputs = outlier_inputs(linears, count, device)
                    contenders = [from_layers(method, made, inputs) for method, made in layers.items()]
                    if gemm:
                        contenders += [c for fmt in (FP8, INT8) for c in products_alone(fmt, inputs, weights)]
                    report(compare(contenders, linears, inputs, weights, ranks, repeat), csv)


def outlier_weights(linears: Sequence[Linear], device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    return [outlier_weight(linear.n, linear.k, generator) for linear in linears]


def outlier_inputs(linears: Sequence[Linear], tokens: int, device: torch.device) -> list[torch.Tensor]:
    """An input for each linear; linears of the same width share it."""
    generator = torch.Generator(device).manual_seed(1)
    widths = dict.fromkeys(linear.k for linear in linears)
    by_width = {k: outlier_input(tokens, k, generator) for k in widths}
    return [by_width[linear.k] for linear in linears]


def build(
    method: str, linears: Sequence[Linear], weights: Sequence[torch.Tensor], device: torch.device
) -> list[Any] | str:
    """The layers in ``method``, or why it does not run here."""
    reason = refusal(method, device)
    return reason or [linear_layer(linear, method, weight) for linear, weight in zip(linears, weights, strict=True)]


def from_layers(method: str, layers: list[Any] | str, inputs: Sequence[torch.Tensor]) -> Contender:
    if isinstance(layers, str):
        return Contender(method, unavailable=layers)
    calls = [partial(layer, x) for layer, x in zip(layers, inputs, strict=True)]
    mib = [weight_mib(layer) for layer in layers]
    extras = [{"weight_mib": one, "kernel": kernel(layer)} for one, layer in zip(mib, layers, strict=True)]
    return Contender(method, calls, extras, {"weight_mib": sum(mib)})


def products_alone(fmt: CodeFormat, inputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> list[Contender]:
    """Every backend of ``fmt`` on this device, on operands that are quantized once for all of them."""

    def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return quantize_rows(x, fmt, rotation=largest_group(x.shape[1], ROTATION[fmt]))

    activations = {x.shape[1]: quantize(x) for x in inputs}

    def product(weight: torch.Tensor) -> Product:
        (a, scale_a), (b, scale_b) = activations[weight.shape[1]], quantize(weight)
        return Product(a, b.t(), scale_a, scale_b.t(), None, torch.bfloat16)

    products = [product(weight) for weight in weights]
    return [
        Contender(
            f"gemm {backend.name}",
            [partial(backend.run, product) for product in products],
            [{}] * len(products),
        )
        for backend in backends_here(fmt)
    ]


def compare(
    contenders: Sequence[Contender],
    linears: Sequence[Linear],
    inputs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    ranks: int,
    repeat: int,
) -> list[Row]:
    """Rows of each linear and of all in sequence, every contender in one interleaved run."""
    tokens, device = inputs[0].shape[0], inputs[0].device
    sampled = slice(None, None, max(1, tokens // SAMPLED_ROWS))
    rows: list[Row] = []
    for index, linear in enumerate(linears):
        exact = torch.nn.functional.linear(inputs[index], weights[index])[sampled].clone()
        case = {"linear": linear.name, "k": linear.k, "n": linear.n, "tokens": tokens, "tp": ranks}
        variants = [_one(contender, index, linear.flops(tokens), sampled, exact) for contender in contenders]
        rows += measure("linear", case, variants, device=device, repetitions=repeat)
    case = {"linear": "all four", "k": None, "n": None, "tokens": tokens, "tp": ranks}
    flops = sum(linear.flops(tokens) for linear in linears)
    variants = [_sequence(contender, flops) for contender in contenders]
    return rows + measure("linear", case, variants, device=device, repetitions=repeat)


def _one(contender: Contender, index: int, flops: int, sampled: slice, exact: torch.Tensor) -> Variant:
    if contender.unavailable is not None:
        return Variant.missing(contender.name, contender.unavailable)
    product = contender.products[index]
    extra = {"relative_error": relative_l2(product()[sampled], exact), **contender.extras[index]}
    return Variant(contender.name, product, flops=flops, extra=extra)


def _sequence(contender: Contender, flops: int) -> Variant:
    if contender.unavailable is not None:
        return Variant.missing(contender.name, contender.unavailable)

    def run() -> None:
        for product in contender.products:
            product()

    return Variant(contender.name, run, flops=flops, extra=contender.whole)


if __name__ == "__main__":
    typer.run(main)
