"""Decides about the engine's attention layers as they are built, and carries it out."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch.nn import Module

from vllm_h3_quant.attention.decision import AttentionDecision, decide
from vllm_h3_quant.attention.facts import is_served_platform, layer_facts, this_device
from vllm_h3_quant.attention.implementation import QuantizedAttention
from vllm_h3_quant.attention.request import AttentionRequest, request_of
from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.upstream import attention as upstream


def decide_layer(layer: Any, od_config: Any) -> AttentionDecision | None:
    """What becomes of an attention layer at the end of its construction; None leaves it to the engine.

    Raises:
        H3QuantError: the request contradicts itself, the device cannot run it, or the engine's own option
            asks for what this layer cannot do.
    """
    request = request_of(od_config)
    facts = layer_facts(layer, od_config.parallel_config)
    if request is None or facts is None or not is_served_platform():
        return None
    return decide(request, facts, this_device())


def quantized_attention(layer: Any, decision: AttentionDecision) -> QuantizedAttention | None:
    """What a decision puts around a layer's implementation; None to keep that."""
    if decision.kind is None:
        return None
    return QuantizedAttention(
        layer.attention,
        kind=decision.kind,
        softmax_scale=layer.softmax_scale,
        skipped_steps=decision.skipped_steps,
    )


def decision_of(layer: Any) -> AttentionDecision | None:
    """What was decided about a layer, or None where nothing was asked."""
    decision: AttentionDecision | None = upstream.decision_of(layer)
    return decision


def check(od_config: Any, model: Module) -> None:
    """Refuse a request that reaches nothing, now that the model is known and no weight has been read.

    Raises:
        H3QuantError: no attention layer was asked about, a selector names a block that is not there, or
            one leaves no block.
    """
    request = request_of(od_config)
    if request is None or not is_served_platform():
        return
    decided = [layer for _, layer in upstream.layers(model) if decision_of(layer) is not None]
    found = [facts.block for layer in decided if (facts := layer_facts(layer, od_config.parallel_config))]
    blocks = {block for block in found if block is not None}
    if not blocks:
        raise H3QuantError(f"{request.source} reached no attention layer of this model")
    _check_names(request, blocks)
    if blocks <= request.skipped_blocks and not request.token_refiner:
        raise H3QuantError(f"{request.source}: the selectors skip all of blocks 0-{max(blocks)}; leave some of them in")


def _check_names(request: AttentionRequest, blocks: Collection[int]) -> None:
    absent = sorted(request.named_blocks - set(blocks))
    if absent:
        raise H3QuantError(
            f"attention_skip_layers names block {absent[0]}, the nearest of this model is {max(blocks)}: its blocks are"
            f" 0-{max(blocks)}"
        )
