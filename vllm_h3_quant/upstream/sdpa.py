"""Calls the engine's SDPA on any device.

Why: ``AttentionImpl.forward`` picks a method by accelerator and raises on a CPU; the shared body is
private. Symbol: ``SDPAImpl._forward_impl(query, key, value, attn_metadata, mask_mode)`` in
``vllm_omni.diffusion.attention.backends.sdpa``, vLLM-Omni 0.30.0. When it moves: check which body
``forward_cuda`` calls and with which ``mask_mode``.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_h3_quant.upstream.preflight import Symbol, require

SYMBOLS = (
    Symbol(
        "vllm-omni",
        "vllm_omni.diffusion.attention.backends.sdpa",
        "SDPAImpl._forward_impl",
        ("query", "key", "value", "attn_metadata", "mask_mode"),
    ),
)


def check_sdpa() -> None:
    """Refuse to build the backend when its body has moved."""
    require(SYMBOLS)


def run_sdpa(
    impl: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_metadata: object
) -> torch.Tensor:
    """Attention over ``(B, S, H, D)`` tensors with the mask, if any, broadcast over queries."""
    out: torch.Tensor = impl._forward_impl(query, key, value, attn_metadata, mask_mode="broadcast_k")
    return out
