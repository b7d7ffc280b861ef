"""A whole MiniMax-H3 DiT block, and its parts, in every method in one interleaved run.

The block is vLLM-Omni's own: AdaLN, norms, qkv projection, RoPE, attention, output projection and MLP, with the
engine's attention backend but for the ``_full`` methods. Its weights are random with outlier channels and enter
through the layers' weight loaders; the inputs have outlier channels too. ``update_error`` is the relative error of
what the block adds to its input, ``y - x``, against the bf16 block's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from h3_layers import (
    ALL_METHODS,
    attention_kernel,
    block,
    check_methods,
    engine,
    kernel,
    normal,
    outlier_input,
    refusal,
    weight_mib,
)
from harness.measure import Variant, measure
from harness.report import Row, report
from shapes import H3, TINY, BlockShape, parse_tokens

from vllm_h3_quant.testing.numeric import relative_l2

TIMESTEPS = 2
MODALITIES = 3
ROPE_WIDTH = 96


def main(
    tokens: Annotated[Any, typer.Option(parser=parse_tokens, metavar="N,4s,..", help="Tokens, or seconds.")] = "4s",
    methods: Annotated[Any, typer.Option(parser=check_methods, metavar="M,..", help="Methods.")] = ALL_METHODS,
    tiny: Annotated[bool, typer.Option(help="A small block, for a CPU.")] = False,
    repeat: Annotated[int, typer.Option(min=1, help="Timed calls of each variant.")] = 10,
    csv: Annotated[Path | None, typer.Option(help="Append the rows to this file.")] = None,
) -> None:
    """Time a MiniMax-H3 DiT block: bf16, vLLM-Omni's methods and this package's."""
    shape = TINY if tiny else H3
    with engine() as device:
        refused = {method: refusal(method, device) for method in methods}
        blocks = {method: block(shape, method, device) for method in methods if refused[method] is None}
        for count in tokens:
            with torch.inference_mode():
                report(compare(shape, blocks, refused, count, device, repeat), csv)


def compare(
    shape: BlockShape,
    blocks: dict[str, Any],
    refused: dict[str, str | None],
    tokens: int,
    device: torch.device,
    repeat: int,
) -> list[Row]:
    """Rows of the block and of its parts."""
    x, arguments = block_inputs(shape, tokens, device)
    about = describe(blocks, x, arguments)
    generator = torch.Generator(device).manual_seed(2)
    h = normal(tokens, shape.hidden, generator).bfloat16()
    inner = normal(tokens, shape.heads * shape.head_dim, generator).bfloat16()
    calls = {method: parts(model, x, h, inner, arguments) for method, model in blocks.items()}
    rows: list[Row] = []
    for part, flops in part_flops(shape, tokens).items():
        variants = [
            Variant(method, calls[method][part], flops=flops, extra=about[method] if part == "block" else {})
            if reason is None
            else Variant.missing(method, reason)
            for method, reason in refused.items()
        ]
        case = {"part": part, "tokens": tokens}
        rows += measure("block", case, variants, device=device, repetitions=repeat, warmup=2)
    return rows


def block_inputs(shape: BlockShape, tokens: int, device: torch.device) -> tuple[torch.Tensor, dict[str, Any]]:
    """A residual stream with outlier channels, and the block's other arguments for one packed clip."""
    from vllm_omni.diffusion.models.minimax_h3.minimax_h3_transformer import _build_rope_table

    generator = torch.Generator(device).manual_seed(1)
    at_random: dict[str, Any] = {"generator": generator, "device": device}
    x = outlier_input(tokens, shape.hidden, generator)
    t_emb = normal(TIMESTEPS, shape.time_embed, generator)
    indices = torch.randint(0, TIMESTEPS * MODALITIES, (tokens,), **at_random)
    angles = torch.rand(tokens, ROPE_WIDTH, dtype=torch.float32, **at_random) * 6
    arguments = {
        "t_emb": t_emb,
        "combined_indices": indices,
        "rope_table": _build_rope_table(angles),
        "cu_seqlens": torch.tensor([0, tokens], dtype=torch.int32, device=device),
        "max_seqlen": tokens,
        "packed_total": tokens,
    }
    return x, arguments


def describe(blocks: dict[str, Any], x: torch.Tensor, arguments: dict[str, Any]) -> dict[str, dict[str, object]]:
    """What the rows of the whole block tell beside times; no errors when bf16 is not measured."""
    bf16 = blocks.get("bf16")
    reference = None if bf16 is None else bf16(x, **arguments).float() - x.float()
    about: dict[str, dict[str, object]] = {}
    for method, model in blocks.items():
        error = None if reference is None else relative_l2(model(x, **arguments).float() - x.float(), reference)
        about[method] = {
            "update_error": error,
            "weight_mib": weight_mib(model),
            "kernel": kernel(model.attn.qkv_proj),
            "attention": attention_kernel(model.attn.attention),
        }
    return about


def part_flops(shape: BlockShape, tokens: int) -> dict[str, int]:
    """Operations of each part; elementwise ones are not counted."""
    qkv, out, fc1, fc2 = (linear.flops(tokens) for linear in shape.linears)
    attention = qkv + shape.attention_flops(tokens) + out
    return {
        "block": attention + fc1 + fc2,
        "qkv": qkv,
        "out": out,
        "mlp": fc1 + fc2,
        "attention": attention,
        "adaln": shape.adaln.flops(TIMESTEPS),
    }


def parts(
    model: Any, x: torch.Tensor, h: torch.Tensor, inner: torch.Tensor, arguments: dict[str, Any]
) -> dict[str, Callable[[], object]]:
    """The block and its parts as calls; ``attention`` includes its two projections.

    Args:
        x: residual stream ``(tokens, hidden)``.
        h: what stands for a normed residual stream.
        inner: what stands for the output of attention, ``(tokens, heads * head_dim)``.
    """
    around = {name: arguments[name] for name in ("rope_table", "cu_seqlens", "max_seqlen", "packed_total")}
    return {
        "block": partial(model, x, **arguments),
        "qkv": partial(model.attn.qkv_proj, h),
        "out": partial(model.attn.out_proj, inner),
        "mlp": partial(model.mlp, h),
        "attention": partial(model.attn, h, **around),
        "adaln": partial(model.adaln_proj, arguments["t_emb"]),
    }


if __name__ == "__main__":
    typer.run(main)
