"""Which calls of an attention layer the kernels serve, told from shapes and metadata on the host.

MiniMax-H3 packs its sequence as documents: one a request, and one for the padding behind it. On a backend
that takes a mask it also builds one over the keys, ``arange(total) < used`` of shape ``(1, total)``, which
says no more than ``cu_seqlens`` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

DTYPES = (torch.bfloat16, torch.float16)


def refusal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: Any) -> str | None:
    """Why a call stays with the engine's attention, or None where the kernels serve it.

    Reads no value from the device.

    Args:
        query, key, value: ``(1, tokens, heads, head_size)``.
        metadata: the engine's ``AttentionMetadata``, or None.
    """
    if metadata is None:
        return "the call has no packed sequence lengths"
    extra = metadata.extra
    missing = [name for name in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k") if name not in extra]
    if missing:
        return f"the call has no {', '.join(missing)}"
    if query.shape[0] != 1:
        return f"the batch holds {query.shape[0]} sequences that are not packed"
    if not query.shape == key.shape == value.shape:
        return "query, key and value differ in shape"
    # Two tensors with equal values are not seen as such: comparing them would wait for the device.
    if extra["cu_seqlens_q"] is not extra["cu_seqlens_k"] or extra["max_seqlen_q"] != extra["max_seqlen_k"]:
        return "queries and keys have sequence lengths of their own"
    if extra["cu_seqlens_q"].dtype is not torch.int32 or not isinstance(extra["max_seqlen_q"], int):
        return "sequence lengths are not int32 on the device with their maximum on the host"
    if not query.dtype is key.dtype is value.dtype or query.dtype not in DTYPES:
        return f"{str(query.dtype).removeprefix('torch.')} is neither bfloat16 nor float16"
    if any(tensor.stride(-1) != 1 for tensor in (query, key, value)):
        return "channels of a head are not next to each other in memory"
    if metadata.full_attn_spans is not None:
        return "parts of the sequence are causal"
    if metadata.query_ranges is not None:
        return "queries are a part of the sequence"
    if any(getattr(metadata, f"joint_{name}") is not None for name in ("query", "key", "value", "attn_mask")):
        return "joint tensors are appended"
    if metadata.attn_mask is not None and not _is_padding(metadata.attn_mask, query.shape[1], extra):
        return "an attention mask"
    return None


def _is_padding(mask: torch.Tensor, tokens: int, extra: Mapping[str, Any]) -> bool:
    """Whether a mask can only be the packing's own: two documents, of which the first is the longest."""
    used = extra.get("valid_kv_length")
    return (
        mask.dtype is torch.bool
        and mask.shape == (1, tokens)
        and isinstance(used, int)
        and used == extra["max_seqlen_q"]
        and used < tokens
        and extra["cu_seqlens_q"].shape == (3,)
    )
