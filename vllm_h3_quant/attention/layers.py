"""Which attention layers are replaced, and why the others are not."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from torch.nn import Module

from vllm_h3_quant.attention.implementation import QuantizedAttention
from vllm_h3_quant.attention.request import AttentionRequest, request_of
from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.kernels.attention import HEAD_SIZES
from vllm_h3_quant.upstream.attention import Decision, decision_of, layers

_BLOCK = re.compile(r"blocks\.\d+\.attn")
_TOKEN_REFINER = re.compile(r"token_refiner\.blocks\.\d+\.attn")

DENSE_BACKENDS = (
    "FLASH_ATTN",
    "FLASH_ATTN_HUB",
    "FLASH_ATTN_3_HUB",
    "CUDNN_ATTN",
    "FLASHINFER_ATTN",
    "TRTLLM_ATTN",
    "SDPA",
)
"""Backends of exact attention. Sparse and quantized ones are a choice of the user's, which stays."""

SKIPPED = "skipped by selector"
NOT_ASKED = "token refiner, not asked for"
KEPT_BY_AUTO = "kept by auto"


def decide(layer: Any, od_config: Any) -> Decision | None:
    """What becomes of one of MiniMax-H3's attention layers, at the end of its construction.

    Raises:
        H3QuantError: the request contradicts itself, the device cannot run it, or the engine's own option
            asks for what this layer cannot do.
    """
    request = request_of(od_config)
    if request is None:
        return None
    if _BLOCK.fullmatch(layer.prefix):
        selected = SKIPPED if layer.layer_idx in request.skipped_blocks else None
    elif _TOKEN_REFINER.fullmatch(layer.prefix):
        selected = None if request.token_refiner else NOT_ASKED
    else:
        return None
    why = request.choice.why
    if selected is not None:
        return Decision(None, kept=selected, why=why)
    kind = request.choice.kind
    if kind is None:
        return Decision(None, kept=KEPT_BY_AUTO, why=why)
    reason = obstacle(layer, od_config.parallel_config)
    if reason is None:
        implementation = QuantizedAttention(
            layer.attention,
            kind=kind,
            kernel=request.choice.kernel,
            softmax_scale=layer.softmax_scale,
            skipped_steps=request.skipped_steps,
        )
        return Decision(implementation, why=why)
    if request.by_engine_option:
        raise H3QuantError(f"{request.source} cannot be served: {reason}; leave it out")
    return Decision(None, kept=reason, why=why)


def obstacle(layer: Any, parallel_config: Any) -> str | None:
    """Why a layer keeps its implementation in every call, or None."""
    if not layer.skip_sequence_parallel:
        if parallel_config.ring_degree > 1:
            return "ring parallelism"
        if parallel_config.allgather_degree > 1:
            return "all-gather parallelism"
    if layer.causal:
        return "causal attention"
    if layer.num_kv_heads != layer.num_heads:
        return f"{layer.num_heads} query heads share {layer.num_kv_heads} key heads"
    if layer.head_size not in HEAD_SIZES:
        return f"head size {layer.head_size}, the kernels take {' and '.join(map(str, HEAD_SIZES))}"
    backend = layer.attn_backend.get_name()
    if backend not in DENSE_BACKENDS:
        return f"backend {backend}, which is not dense attention"
    if layer.attn_spec is not None and layer.attn_spec.backend_kwargs():
        return f"backend {backend} with options of its own"
    return None


def check(od_config: Any, model: Module) -> None:
    """Refuse a request that reaches nothing, now that the model is known and no weight has been read.

    Raises:
        H3QuantError: no attention layer was asked about, a selector names a block that is not there, or
            one leaves no block.
    """
    request = request_of(od_config)
    if request is None:
        return
    found = [(layer, decision) for _, layer in layers(model) if (decision := decision_of(layer)) is not None]
    blocks = {layer.layer_idx for layer, _ in found if _BLOCK.fullmatch(layer.prefix)}
    if not blocks:
        raise H3QuantError(f"{request.source} reached no attention layer of this model")
    _check_names(request, blocks)
    if blocks <= request.skipped_blocks and not request.token_refiner:
        raise H3QuantError(f"{request.source}: the selectors skip all of blocks 0-{max(blocks)}; leave some of them in")


def _check_names(request: AttentionRequest, blocks: Iterable[int]) -> None:
    absent = sorted(request.named_blocks - set(blocks))
    if absent:
        raise H3QuantError(
            f"attention_skip_layers names block {absent[0]}, the nearest of this model is {max(blocks)}: its blocks are"
            f" 0-{max(blocks)}"
        )
