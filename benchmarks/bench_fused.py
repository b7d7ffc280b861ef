"""Each producer of codes beside the kernels it stands for: the engine's step, then quantization.

Rates count the bytes that the fused form must move: bf16 values in, 8-bit codes out, and the residual stream where it
is written. Preparation of attention reads q, k and v twice, since means come before codes, and writes q and k between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from bench_block import MODALITIES, ROPE_WIDTH, TIMESTEPS
from h3_layers import engine, normal, outlier_input
from harness.measure import Variant, measure
from harness.report import Row, report
from shapes import H3, TINY, BlockShape, parse_tokens

from vllm_h3_quant.config.schema import PRESETS
from vllm_h3_quant.kernels import producers
from vllm_h3_quant.kernels.attention import rotary_of
from vllm_h3_quant.kernels.attention.codes import slot_codes_triton, token_codes_triton
from vllm_h3_quant.kernels.attention.documents import locate_documents
from vllm_h3_quant.kernels.attention.mean import add_mean, mean_codes
from vllm_h3_quant.kernels.attention.rotary import Rotary
from vllm_h3_quant.kernels.attention.scaling import scaling_triton
from vllm_h3_quant.kernels.formats import FP8
from vllm_h3_quant.kernels.quantize import quantized
from vllm_h3_quant.kernels.rows import RowFormat

EPS = 1e-5
FORMATS = {"fp8": RowFormat("fp8", 0), "int8": RowFormat("int8", PRESETS["h3_int8"]["rotation"])}


class Step(NamedTuple):
    """One step of a block.

    Attributes:
        name: what it does.
        plain: the kernels one after another.
        fused: the producer; None where the step has none.
        bytes: that the fused form, or else the plain one, must move.
    """

    name: str
    plain: Callable[[], object]
    fused: Callable[[], object] | None
    bytes: int


def main(
    tokens: Annotated[Any, typer.Option(parser=parse_tokens, metavar="N,4s,..", help="Tokens, or seconds.")] = "4s",
    tiny: Annotated[bool, typer.Option(help="A small block, for a quick look.")] = False,
    repeat: Annotated[int, typer.Option(min=1, help="Timed calls of each variant.")] = 20,
    csv: Annotated[Path | None, typer.Option(help="Append the rows to this file.")] = None,
) -> None:
    """Time the producers of codes against the engine's steps with quantization."""
    shape = TINY if tiny else H3
    with engine() as device, torch.inference_mode():
        if device.type != "cuda":
            raise SystemExit("bench_fused.py needs a CUDA device: elsewhere a producer is the plain kernels")
        for count in tokens:
            for kind in FORMATS:
                report(compare(shape, count, kind, device, repeat), csv)


def compare(shape: BlockShape, tokens: int, kind: str, device: torch.device, repeat: int) -> list[Row]:
    """Rows of every step that leads to codes of ``kind``."""
    rows: list[Row] = []
    for step in steps(shape, tokens, kind, device):
        variants = [Variant("plain", step.plain, bytes=None if step.fused else step.bytes)]
        if step.fused is not None:
            variants.append(Variant("fused", step.fused, bytes=step.bytes))
        case = {"step": step.name, "tokens": tokens, "codes": kind}
        rows += measure("fused", case, variants, device=device, repetitions=repeat, warmup=2)
    return rows


def steps(shape: BlockShape, tokens: int, kind: str, device: torch.device) -> Iterator[Step]:
    """The steps one after another; each frees its operands."""
    generator = torch.Generator(device).manual_seed(1)
    yield from _modulation(shape, tokens, FORMATS[kind], generator)
    yield _swiglu(shape, tokens, FORMATS[kind], generator)
    yield _preparation(shape, tokens, kind, generator)
    if kind == "fp8":
        yield _output(shape, tokens, FORMATS[kind], generator)


def _modulation(shape: BlockShape, tokens: int, codes: RowFormat, generator: torch.Generator) -> Iterator[Step]:
    from vllm_omni.diffusion.layers import indexed_modulation as stock

    hidden = shape.hidden
    x, branch = outlier_input(tokens, hidden, generator), normal(tokens, hidden, generator).bfloat16()
    weight = torch.ones(hidden, dtype=torch.bfloat16, device=x.device)
    shift, scale, gate = normal(TIMESTEPS * MODALITIES, 3 * hidden, generator).bfloat16().chunk(3, dim=-1)
    indices = torch.arange(tokens, device=x.device) % (TIMESTEPS * MODALITIES)
    affine = (weight, shift, scale, indices, EPS)
    yield Step(
        "norm, AdaLN",
        lambda: quantized(stock.rms_norm_indexed_scale_shift(x, *affine), codes),
        lambda: producers.norm_modulate(x, *affine, codes),
        tokens * hidden * (2 + 1),
    )
    yield Step(
        "gated residual, norm, AdaLN",
        lambda: quantized(stock.indexed_gate_rms_norm_scale_shift(x, gate, branch, *affine)[1], codes),
        lambda: producers.gate_norm_modulate(x, gate, branch, *affine, codes),
        tokens * hidden * (2 + 2 + 2 + 1),
    )
    yield Step("gated residual", lambda: stock.indexed_gate(x, gate, branch, indices), None, tokens * hidden * 6)


def _swiglu(shape: BlockShape, tokens: int, codes: RowFormat, generator: torch.Generator) -> Step:
    from vllm_omni.diffusion.layers.activation import SiluAndMul

    x = normal(tokens, 2 * shape.ffn, generator).bfloat16()
    act = SiluAndMul()
    moved = tokens * shape.ffn * (2 + 2 + 1)
    return Step("SwiGLU", lambda: quantized(act(x), codes), lambda: producers.swiglu(x, codes), moved)


def _preparation(shape: BlockShape, tokens: int, kind: str, generator: torch.Generator) -> Step:
    from vllm_omni.diffusion.layers.fused_qk_norm_rope import fused_qk_norm_rope

    inner = shape.heads * shape.head_dim
    qkv = normal(tokens, 3 * inner, generator).bfloat16()
    q, k, v = (part.unflatten(-1, (shape.heads, shape.head_dim)) for part in qkv.chunk(3, dim=-1))
    angles = torch.rand(tokens, ROPE_WIDTH // 2, generator=generator, device=qkv.device) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=-1).bfloat16()
    weight = torch.ones(shape.head_dim, dtype=torch.bfloat16, device=qkv.device)
    bounds = torch.tensor([0, tokens], dtype=torch.int32, device=qkv.device)

    def prepared(q: torch.Tensor, k: torch.Tensor, rotary: Rotary | None = None) -> object:
        documents = locate_documents(bounds, tokens, tokens)
        by_head = kind == "fp8"
        scaling = scaling_triton(q, k, v, documents, v_format=FP8, by_head=by_head, rotary=rotary)
        if rotary is not None:
            q, k = rotary.rows
        if by_head:
            return token_codes_triton(q, k, v, documents, scaling)
        return slot_codes_triton(q, k, v, documents, scaling, FP8)

    return Step(
        "q/k norm, RoPE, preparation",
        lambda: prepared(*fused_qk_norm_rope(q, k, weight, weight, table, EPS)),
        lambda: prepared(q, k, rotary_of(weight, weight, table, EPS, heads=shape.heads)),
        tokens * inner * (3 * (2 + 2 + 1) + 2 * 2),
    )


def _output(shape: BlockShape, tokens: int, codes: RowFormat, generator: torch.Generator) -> Step:
    inner = shape.heads * shape.head_dim
    out = normal(tokens, inner, generator).bfloat16().view(tokens, shape.heads, shape.head_dim)
    mean = normal(1, inner, generator).view(1, shape.heads, shape.head_dim)
    documents = locate_documents(torch.tensor([0, tokens], dtype=torch.int32, device=out.device), tokens, tokens)
    return Step(
        "V's mean",
        lambda: quantized(add_mean(out, mean, documents).flatten(1), codes),
        lambda: mean_codes(out, mean, documents, codes),
        tokens * inner * (2 + 1),
    )


if __name__ == "__main__":
    typer.run(main)
