"""Which implementation serves which kind of 8-bit attention on which device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from vllm_h3_quant.kernels.attention.codes import (
    slot_codes_reference,
    slot_codes_triton,
    token_codes_reference,
    token_codes_triton,
)
from vllm_h3_quant.kernels.attention.documents import locate_documents
from vllm_h3_quant.kernels.attention.fp8 import flash_attention_missing, fp8_attention_flash, fp8_attention_reference
from vllm_h3_quant.kernels.attention.int8 import int8_attention_reference, int8_attention_triton
from vllm_h3_quant.kernels.attention.mean import with_mean, with_mean_reference
from vllm_h3_quant.kernels.attention.rotary import Rotary
from vllm_h3_quant.kernels.attention.scaling import scaling_reference, scaling_triton
from vllm_h3_quant.kernels.backend import Capability, NoBackend, nothing_missing, out_of_range
from vllm_h3_quant.kernels.formats import FP8, INT8, CodeFormat
from vllm_h3_quant.kernels.quantize import quantized
from vllm_h3_quant.kernels.rows import QuantizedRows, RowFormat

KINDS: tuple[str, ...] = ("int8", "fp8")
FASTEST_FIRST: tuple[str, ...] = ("fp8", "int8")
SHARP_ERROR: dict[str, float] = {"int8": 0.035, "fp8": 0.110}
"""Relative error that each kind stays below where scores are sharp: synthetic operands with an RMS of q and k of 4.0.
Tests on the GPU hold it; docs/fidelity.md has what was measured."""


class Call(NamedTuple):
    """One call of attention.

    Attributes:
        q, k, v: packed ``(tokens, heads, head_size)`` operands.
        cu_seqlens: ``(documents + 1,)`` int32 on their device.
        max_seqlen: tokens of the longest document, or more.
        softmax_scale: of the scores.
        rotary: norm and rotation that Q and K still lack; only Triton backends compute them.
        row_format: of the result as ``(tokens, heads * head_size)`` codes; None for values.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    softmax_scale: float
    rotary: Rotary | None = None
    row_format: RowFormat | None = None


Run = Callable[[Call], "torch.Tensor | QuantizedRows"]


@dataclass(frozen=True)
class AttentionBackend:
    """One implementation of one kind.

    Attributes:
        name: as printed in logs and reports.
        kind: one of :data:`KINDS`.
        capabilities: first served CUDA compute capability and the first one past the range, or None
            for a backend of the CPU.
        run: attention from packed ``(tokens, heads, head_size)`` operands, preparation included.
        missing: why the backend cannot be used in this process, or None.
    """

    name: str
    kind: str
    capabilities: tuple[Capability, Capability] | None
    run: Run
    missing: Callable[[], str | None] = nothing_missing

    def refusal(self, capability: Capability | None) -> str | None:
        """Why this backend does not serve ``capability`` (None is the CPU); None when it does."""
        return out_of_range(self.capabilities, capability) or self.missing()


def select(kind: str, capability: Capability | None) -> AttentionBackend:
    """The first backend for ``kind`` on a device.

    Raises:
        NoBackend: with every backend of the kind and why it does not fit.
    """
    reasons = []
    for backend in BACKENDS:
        if backend.kind == kind:
            reason = backend.refusal(capability)
            if reason is None:
                return backend
            reasons.append(f"{backend.name} {reason}")
    raise NoBackend("; ".join(reasons))


def choose(capability: Capability | None, error_bound: float) -> tuple[str | None, str]:
    """What ``auto`` stands for on a device.

    Args:
        capability: CUDA compute capability, or None for the CPU.
        error_bound: largest :data:`SHARP_ERROR` that is accepted.

    Returns:
        The fastest kind within the bound, or None for the stock attention; and the reason.
    """
    if capability is not None and (10, 0) <= capability < (12, 0):
        return None, "Triton has no fast INT8 product for this GPU, and its stock attention is faster than on others"
    reasons = []
    for kind in FASTEST_FIRST:
        if SHARP_ERROR[kind] > error_bound:
            reasons.append(f"{kind} may be {SHARP_ERROR[kind]:.1%} off on sharp scores")
            continue
        try:
            select(kind, capability)
        except NoBackend as error:
            reasons.append(str(error))
            continue
        return kind, "; ".join([f"the fastest within {error_bound:.0%} on sharp scores", *reasons])
    return None, "; ".join(reasons)


def _in_slots(v_format: CodeFormat, scaling: Any, codes: Any, attention: Any) -> Run:
    def run(call: Call) -> torch.Tensor | QuantizedRows:
        q, k, v = call.q, call.k, call.v
        documents = locate_documents(call.cu_seqlens, q.shape[0], call.max_seqlen)
        factors = scaling(q, k, v, documents, v_format=v_format, by_head=False, **_if_given(call.rotary))
        coded = codes(*_turned(call), v, documents, factors, v_format)
        out: torch.Tensor = attention(coded, factors, documents, call.softmax_scale, q.dtype)
        # A program sees one head of a token, whose scale spans all heads: codes are made in a pass of their own.
        return out if call.row_format is None else quantized(out.flatten(1), call.row_format)

    return run


def _at_tokens(scaling: Any, codes: Any, attention: Any, finish: Any) -> Run:
    def run(call: Call) -> torch.Tensor | QuantizedRows:
        q, k, v = call.q, call.k, call.v
        documents = locate_documents(call.cu_seqlens, q.shape[0], call.max_seqlen)
        factors = scaling(q, k, v, documents, v_format=FP8, by_head=True, **_if_given(call.rotary))
        coded = codes(*_turned(call), v, documents, factors)
        out = attention(coded, factors, documents, call.softmax_scale)
        result: torch.Tensor | QuantizedRows = finish(out, factors.v_mean, documents, q.dtype, call.row_format)
        return result

    return run


def _if_given(rotary: Rotary | None) -> dict[str, Rotary]:
    """As an argument for the forms that take one: plain PyTorch has none, the engine's own norm comes before it."""
    return {} if rotary is None else {"rotary": rotary}


def _turned(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Q and K as attention takes them, once they have been summed."""
    return (call.q, call.k) if call.rotary is None else (call.rotary.rows[0], call.rotary.rows[1])


_INT8 = (scaling_triton, slot_codes_triton, int8_attention_triton)
_INT8_REFERENCE = (scaling_reference, slot_codes_reference, int8_attention_reference)
_FP8 = (scaling_triton, token_codes_triton, fp8_attention_flash, with_mean)
_FP8_REFERENCE = (scaling_reference, token_codes_reference, fp8_attention_reference, with_mean_reference)

BACKENDS: tuple[AttentionBackend, ...] = (
    AttentionBackend("Triton INT8 attention, FP8 V", "int8", ((8, 9), (13, 0)), _in_slots(FP8, *_INT8)),
    AttentionBackend("Triton INT8 attention, INT8 V", "int8", ((8, 0), (8, 9)), _in_slots(INT8, *_INT8)),
    AttentionBackend("PyTorch reference INT8 attention", "int8", None, _in_slots(FP8, *_INT8_REFERENCE)),
    AttentionBackend("FlashAttention-3 FP8", "fp8", ((9, 0), (10, 0)), _at_tokens(*_FP8), flash_attention_missing),
    AttentionBackend("PyTorch reference FP8 attention", "fp8", None, _at_tokens(*_FP8_REFERENCE)),
)
