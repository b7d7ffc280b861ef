"""8-bit attention as one operator that torch.compile knows."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from vllm_h3_quant.kernels.attention.backends import AttentionBackend, Call, select
from vllm_h3_quant.kernels.attention.rotary import Rotary
from vllm_h3_quant.kernels.quantize import quantized
from vllm_h3_quant.kernels.rows import QuantizedRows, RowFormat

HEAD_SIZES: tuple[int, ...] = (64, 128)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    max_seqlen: int,
    softmax_scale: float,
    kind: str,
) -> torch.Tensor:
    """``softmax(q k^T * softmax_scale) v`` within each document, by 8-bit products.

    Args:
        query, key, value: ``(tokens, heads, head_size)`` bf16 or fp16 with the last stride 1, for example views of
            one qkv tensor.
        cu_seqlens: ``(documents + 1,)`` int32 on the operands' device, ascending from 0. Nothing reads it on the host.
        max_seqlen: tokens of the longest document, or more.
        softmax_scale: of the scores.
        kind: ``int8`` or ``fp8``.

    Returns:
        ``(tokens, heads, head_size)``, contiguous. Tokens past the last document are undefined.

    Raises:
        ValueError: operands of different shape, head size or layout that no backend takes.
        NoBackend: the device does not serve the kind.
    """
    _check(query, key, value)
    return _attend(query, key, value, cu_seqlens, max_seqlen, softmax_scale, kind)


def attend_fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    max_seqlen: int,
    softmax_scale: float,
    kind: str,
    rotary: Rotary | None,
    row_format: RowFormat | None,
) -> torch.Tensor | QuantizedRows:
    """:func:`attend` together with what comes before and after it. No operator of torch.compile's.

    Args:
        query, key, value, cu_seqlens, max_seqlen, softmax_scale, kind: as for :func:`attend`.
        rotary: norm and rotation of Q and K, computed while they are read; None where they have them. On a GPU only.
        row_format: to get ``(tokens, heads * head_size)`` codes for the next linear; None for values.

    Returns:
        Codes, or values as of :func:`attend`.

    Raises:
        ValueError, NoBackend: as :func:`attend` does.
    """
    _check(query, key, value)
    if not query.shape[0]:
        return _empty(query, row_format)
    call = Call(query, key, value, cu_seqlens, max_seqlen, softmax_scale, rotary, row_format)
    return _backend_of(kind, query.device).run(call)


def _check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    if query.shape != key.shape or query.shape != value.shape:
        raise ValueError(f"q, k, v differ in shape: {tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}")
    if query.shape[-1] not in HEAD_SIZES:
        raise ValueError(f"head size {query.shape[-1]} is not served; use one of {HEAD_SIZES}")
    if {query.stride(-1), key.stride(-1), value.stride(-1)} != {1}:
        raise ValueError("the channels of q, k and v must lie next to each other")


def _empty(query: torch.Tensor, row_format: RowFormat | None) -> torch.Tensor | QuantizedRows:
    empty = torch.empty_like(query, memory_format=torch.contiguous_format)
    return empty if row_format is None else quantized(empty.flatten(1), row_format)


@torch.library.custom_op(
    "h3_quant::attention",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, SymInt max_seqlen, float scale, str kind) -> Tensor",
)
def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
    kind: str,
) -> torch.Tensor:
    if not q.shape[0]:
        return torch.empty_like(q, memory_format=torch.contiguous_format)
    out = _backend_of(kind, q.device).run(Call(q, k, v, cu_seqlens, max_seqlen, scale))
    assert isinstance(out, torch.Tensor)
    return out


@_attend.register_fake
def _(q: torch.Tensor, *others: Any) -> torch.Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


@cache
def _backend_of(kind: str, device: torch.device) -> AttentionBackend:
    return select(kind, torch.cuda.get_device_capability(device) if device.type == "cuda" else None)
