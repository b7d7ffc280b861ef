"""What each step of preparation contributes to the accuracy of 8-bit attention.

The steps are applied to the operands one after the other, in PyTorch; codes and attention are those of the kernels.
A step that a row leaves out is undone beforehand: an operand that is rotated backwards comes out of the kernel's
rotation as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from bench_attention import SAMPLED_ROWS, amplitudes, one_document
from harness.report import Row, environment, report, untimed
from shapes import H3, parse_tokens

from vllm_h3_quant.kernels.attention.codes import slot_codes_triton, token_codes_triton
from vllm_h3_quant.kernels.attention.documents import TILE, Documents, locate_documents
from vllm_h3_quant.kernels.attention.fp8 import flash_attention_missing, fp8_attention_flash
from vllm_h3_quant.kernels.attention.int8 import int8_attention_triton
from vllm_h3_quant.kernels.attention.mean import add_mean
from vllm_h3_quant.kernels.attention.scaling import Scaling
from vllm_h3_quant.kernels.formats import FP8
from vllm_h3_quant.kernels.hadamard import hadamard_reference
from vllm_h3_quant.testing.attention import Outliers, exact_attention, synthetic_qkv
from vllm_h3_quant.testing.numeric import relative_l2

STEPS = ("codes alone", "+ mean of K removed", "+ mean of V removed", "+ rotation", "+ balance")
HEADS = 8


def whole_tiles(text: str) -> tuple[int, ...]:
    """Token counts without an empty slot, which the INT8 kernel allows for only where the mean of K is removed.

    Raises:
        ValueError: a count that is no multiple of the tile.
    """
    counts = parse_tokens(text)
    for count in counts:
        if count % TILE:
            raise ValueError(
                f"{count} tokens do not fill tiles of {TILE}, the nearest that do are {count // TILE * TILE}"
            )
    return counts


def main(
    tokens: Annotated[Any, typer.Option(parser=whole_tiles, metavar="N,..", help="Tokens, whole tiles.")] = "32768",
    errors: Annotated[Any, typer.Option(parser=amplitudes, metavar="A,..", help="RMS of q and k.")] = "1.6,2.8,4.0",
    outliers: Annotated[Outliers, typer.Option(help="What stands out in Q and K.")] = Outliers.NONE,
    csv: Annotated[Path | None, typer.Option(help="Append the rows to this file.")] = None,
) -> None:
    """Errors of both kinds, step by step."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = False
    kinds: dict[str, Callable[..., torch.Tensor]] = {"int8": int8}
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9 and not flash_attention_missing():
        kinds["fp8"] = fp8
    for count in tokens:
        found: dict[tuple[str, str], dict[str, object]] = {(kind, step): {} for kind in kinds for step in STEPS}
        for level in errors:
            q, k, v = synthetic_qkv(count, HEADS, H3.head_dim, level, device=device, outliers=outliers)
            rows = torch.randint(count, (SAMPLED_ROWS,), device=device)
            exact = exact_attention(q, k, v, H3.head_dim**-0.5, rows=rows, dtype=torch.float32)
            documents = locate_documents(one_document(count, device), count, count)
            for number, step in enumerate(STEPS):
                prepared = prepare(q, k, v, number)
                for kind, run in kinds.items():
                    error = relative_l2(run(prepared, documents, H3.head_dim**-0.5)[rows], exact)
                    found[kind, step][f"error {level:g}"] = error
        case = {"tokens": count, "heads": HEADS, "outliers": outliers.value}
        report([row(kind, step, case, extra, device) for (kind, step), extra in found.items()], csv)


class Operands(NamedTuple):
    """fp32 operands of a kernel, and the mean that goes back on its output."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mean: torch.Tensor


def prepare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, steps: int) -> Operands:
    """The operands after the first ``steps`` steps."""
    q, k, v = q.float(), k.float(), v.float()
    mean = v.mean(0, keepdim=True) if steps >= 2 else torch.zeros_like(v[:1])
    if steps >= 1:
        k = k - k.mean(0, keepdim=True)
    if steps >= 4:
        balance = (q.square().mean(0) / k.square().mean(0)).sqrt().sqrt()
        q, k = q / balance, k * balance
    if steps < 3:
        q, k = _rotated_backwards(q), _rotated_backwards(k)
    return Operands(q, k, v - mean, mean)


def _rotated_backwards(x: torch.Tensor) -> torch.Tensor:
    size = x.shape[-1]
    matrix = hadamard_reference(torch.eye(size, device=x.device), size)
    return x @ matrix.t() / size**0.5  # attention divides its scores by the head size


def int8(operands: Operands, documents: Documents, softmax_scale: float) -> torch.Tensor:
    """Attention by the INT8 kernel on operands as they are."""
    q, k, v, mean = operands
    scaling = _identity(v.abs().amax(0, keepdim=True) / FP8.max, mean)
    codes = slot_codes_triton(q, k, v, documents, scaling, FP8)
    return int8_attention_triton(codes, scaling._replace(v_mean=mean), documents, softmax_scale, torch.bfloat16)


def fp8(operands: Operands, documents: Documents, softmax_scale: float) -> torch.Tensor:
    """Attention by FlashAttention-3 in FP8 on operands as they are."""
    q, k, v, mean = operands
    size = q.shape[-1]
    head_amax = v.abs().amax((0, 2))[None, :, None].expand(1, -1, size).contiguous()
    divisors = [hadamard_reference(x, size).abs().amax((0, 2))[None] / FP8.max for x in (q, k)]
    scaling = _identity(head_amax / FP8.max, mean)._replace(q_divisor=divisors[0], k_divisor=divisors[1])
    codes = token_codes_triton(q, k, v, documents, scaling)
    return add_mean(fp8_attention_flash(codes, scaling, documents, softmax_scale), mean, documents)


def _identity(v_divisor: torch.Tensor, mean: torch.Tensor) -> Scaling:
    one, zero = torch.ones_like(v_divisor), torch.zeros_like(mean)
    none = v_divisor.new_empty(0)
    return Scaling(one, one, zero, zero, v_divisor.contiguous(), none, none)


def row(kind: str, step: str, case: dict[str, object], extra: dict[str, object], device: torch.device) -> Row:
    return untimed("attention ablation", case, f"{kind}: {step}", extra, environment(device))


if __name__ == "__main__":
    typer.run(main)
