"""8-bit attention beside the stock kernel and its peers, with everything that prepares the operands.

Q, K and V are views of one qkv tensor, as a fused projection leaves them. A method's row includes the means, the
rotation and the quantization; rows named ``prepare`` and ``kernel`` time its two halves. ``error`` columns are the
relative L2 distance from fp32 attention on 256 sampled tokens of all heads, at the RMS of q and k in the column.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from harness.measure import Variant, measure
from harness.report import report
from shapes import H3, TINY, BlockShape, parse_tokens

from vllm_h3_quant.kernels import attention
from vllm_h3_quant.kernels.attention.codes import slot_codes_triton, token_codes_triton
from vllm_h3_quant.kernels.attention.documents import locate_documents
from vllm_h3_quant.kernels.attention.fp8 import flash_attention_missing, fp8_attention_flash
from vllm_h3_quant.kernels.attention.int8 import int8_attention_triton
from vllm_h3_quant.kernels.attention.mean import with_mean
from vllm_h3_quant.kernels.attention.scaling import scaling_triton
from vllm_h3_quant.kernels.backend import NoBackend
from vllm_h3_quant.kernels.formats import FP8
from vllm_h3_quant.testing.attention import Outliers, exact_attention, synthetic_qkv
from vllm_h3_quant.testing.numeric import relative_l2

Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

TIMED_AMPLITUDE = 2.8
SAMPLED_ROWS = 256


def amplitudes(text: str) -> tuple[float, ...]:
    """RMS values from a list such as ``"1.6,4"``; empty for none.

    Raises:
        ValueError: an entry that is no positive number.
    """
    return tuple(_amplitude(part) for part in text.split(",") if part)


def _amplitude(part: str) -> float:
    try:
        value = float(part)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError(f"{part!r} is no positive number, write for example '1.6,2.8,4.0'")
    return value


def main(
    tokens: Annotated[Any, typer.Option(parser=parse_tokens, metavar="N,4s,..", help="Tokens, or seconds.")] = "4s",
    errors: Annotated[
        Any, typer.Option(parser=amplitudes, metavar="A,..", help="RMS of q and k at which errors are taken.")
    ] = "1.6,2.8,4.0",
    outliers: Annotated[Outliers, typer.Option(help="What stands out in Q and K.")] = Outliers.NONE,
    peers: Annotated[bool, typer.Option(help="Time other INT8 attention that is installed.")] = True,
    parts: Annotated[bool, typer.Option(help="Time preparation and kernel alone.")] = True,
    tiny: Annotated[bool, typer.Option(help="Two heads, for a CPU.")] = False,
    repeat: Annotated[int, typer.Option(min=1, help="Timed calls of each variant.")] = 10,
    csv: Annotated[Path | None, typer.Option(help="Append the rows to this file.")] = None,
) -> None:
    """Time attention of MiniMax-H3's shape: the stock bf16 kernel, 8-bit kinds of this package, peers."""
    shape = TINY if tiny else H3
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = False
    for count in tokens:
        calls = {**stock(count, device), **ours(count, device), **(peer_calls(device) if peers else {})}
        found = errors_of(calls, shape, count, errors, outliers, device)
        with torch.inference_mode():
            q, k, v = synthetic_qkv(
                count, shape.heads, shape.head_dim, TIMED_AMPLITUDE, device=device, outliers=outliers
            )
            flops = shape.attention_flops(count)
            variants = [
                Variant(name, partial(call, q, k, v), flops=flops, extra=found[name])
                if callable(call)
                else Variant.missing(name, call)
                for name, call in calls.items()
            ]
            if parts and device.type == "cuda":
                variants += halves(q, k, v, flops)
            case = {"tokens": count, "heads": shape.heads, "outliers": outliers.value}
            report(measure("attention", case, variants, device=device, repetitions=repeat, warmup=2), csv)


def stock(tokens: int, device: torch.device) -> dict[str, Call | str]:
    """What the engine runs: FlashAttention-3 in bf16, or PyTorch's attention on a CPU."""
    if device.type == "cpu":
        return {
            "bf16, PyTorch": lambda q, k, v: _heads_first(torch.nn.functional.scaled_dot_product_attention, q, k, v)
        }
    missing = flash_attention_missing()
    if missing:
        return {"bf16, FlashAttention-3": missing}
    from fa3_fwd_interface import flash_attn_varlen_func

    cu_seqlens = one_document(tokens, device)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        bounds = {
            "cu_seqlens_q": cu_seqlens,
            "cu_seqlens_k": cu_seqlens,
            "max_seqlen_q": tokens,
            "max_seqlen_k": tokens,
        }
        out = flash_attn_varlen_func(q, k, v, softmax_scale=q.shape[-1] ** -0.5, **bounds)
        return out[0] if isinstance(out, tuple) else out

    return {"bf16, FlashAttention-3": run}


def ours(tokens: int, device: torch.device) -> dict[str, Call | str]:
    """The kinds that this device serves."""
    cu_seqlens = one_document(tokens, device)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    calls: dict[str, Call | str] = {}
    for kind in attention.KINDS:
        try:
            attention.select(kind, capability)
        except NoBackend as error:
            calls[f"h3 {kind}"] = str(error)
            continue
        calls[f"h3 {kind}"] = partial(_attend, cu_seqlens=cu_seqlens, kind=kind)
    return calls


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, cu_seqlens: torch.Tensor, kind: str) -> torch.Tensor:
    scale = q.shape[-1] ** -0.5
    return attention.attend(q, k, v, cu_seqlens, max_seqlen=q.shape[0], softmax_scale=scale, kind=kind)


def peer_calls(device: torch.device) -> dict[str, Call | str]:
    """INT8 attention of other packages. Each quantizes by itself."""
    if device.type == "cpu":
        return {}
    calls: dict[str, Call | str] = {}
    if importlib.util.find_spec("sageattention"):
        from sageattention import sageattn

        def sage(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            # It subtracts the mean of K in place, and its 32-bit offsets do not reach the end of a long qkv tensor.
            q, k, v = (x.clone(memory_format=torch.contiguous_format)[None] for x in (q, k, v))
            return sageattn(q, k, v, tensor_layout="NHD")[0]

        calls["SageAttention, Triton"] = sage
    else:
        calls["SageAttention, Triton"] = "needs sageattention 1.0.6: pip install sageattention==1.0.6"
    if importlib.util.find_spec("comfy_kitchen"):
        from comfy_kitchen.sage_attention import int8_attention

        calls["comfy-kitchen INT8"] = lambda q, k, v: _heads_first(int8_attention, q, k, v)
    else:
        calls["comfy-kitchen INT8"] = "needs comfy-kitchen: pip install comfy-kitchen"
    return calls


def prepare_bytes(elements: int) -> int:
    """Bytes that preparation must move: three operands, read twice in bf16 and written once in 8 bits."""
    return 3 * elements * (2 * 2 + 1)


def halves(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, flops: int) -> list[Variant]:
    """Preparation and kernel of each kind, timed alone."""
    tokens, _, size = q.shape
    documents = locate_documents(one_document(tokens, q.device), tokens, tokens)
    moved = prepare_bytes(q.numel())

    def scaling(by_head: bool) -> Any:
        return scaling_triton(q, k, v, documents, v_format=FP8, by_head=by_head)

    def slots() -> Any:
        return slot_codes_triton(q, k, v, documents, scaling(False), FP8)

    made = scaling(False)
    codes = slot_codes_triton(q, k, v, documents, made, FP8)
    variants = [
        Variant("h3 int8: prepare", slots, bytes=moved),
        Variant("h3 int8: means and factors", partial(scaling, False)),
        Variant(
            "h3 int8: kernel",
            partial(int8_attention_triton, codes, made, documents, size**-0.5, torch.bfloat16),
            flops=flops,
        ),
    ]
    if q.device.type == "cuda" and torch.cuda.get_device_capability(q.device)[0] == 9 and not flash_attention_missing():
        by_head = scaling(True)
        tokens_codes = token_codes_triton(q, k, v, documents, by_head)
        variants += [
            Variant("h3 fp8: prepare", lambda: token_codes_triton(q, k, v, documents, scaling(True)), bytes=moved),
            Variant(
                "h3 fp8: kernel and mean",
                partial(flash_with_mean, tokens_codes, by_head, documents, size**-0.5),
                flops=flops,
            ),
        ]
    return variants


def flash_with_mean(codes: Any, scaling: Any, documents: Any, softmax_scale: float) -> object:
    out = fp8_attention_flash(codes, scaling, documents, softmax_scale)
    return with_mean(out, scaling.v_mean, documents, out.dtype, None)


def errors_of(
    calls: dict[str, Call | str],
    shape: BlockShape,
    tokens: int,
    levels: tuple[float, ...],
    outliers: Outliers,
    device: torch.device,
) -> dict[str, dict[str, object]]:
    """Distance of each variant from fp32 attention on sampled tokens."""
    found: dict[str, dict[str, object]] = {name: {} for name in calls}
    for level in levels:
        q, k, v = synthetic_qkv(tokens, shape.heads, shape.head_dim, level, device=device, outliers=outliers)
        generator = torch.Generator(device).manual_seed(1)
        rows = torch.randint(tokens, (SAMPLED_ROWS,), generator=generator, device=device)
        exact = exact_attention(q, k, v, shape.head_dim**-0.5, rows=rows, dtype=torch.float32)
        for name, call in calls.items():
            if callable(call):
                with torch.inference_mode():
                    found[name][f"error {level:g}"] = relative_l2(call(q, k, v)[rows], exact)
    return found


def one_document(tokens: int, device: torch.device) -> torch.Tensor:
    return torch.tensor([0, tokens], dtype=torch.int32, device=device)


def _heads_first(run: Callable[..., torch.Tensor], *operands: torch.Tensor) -> torch.Tensor:
    """A kernel that takes ``(1, heads, tokens, head_size)``."""
    out = run(*(x.transpose(0, 1)[None] for x in operands))
    return out[0].transpose(0, 1)


if __name__ == "__main__":
    typer.run(main)
