"""Counts a loaded pipeline's linears, attention layers and fused edges for the load report."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from torch.nn import Module
from vllm.model_executor.layers.linear import LinearBase

from vllm_h3_quant.attention import layers as attention_layers
from vllm_h3_quant.blocks.edges import Edge, obstacles, wants_fusion
from vllm_h3_quant.engine.report import AttentionReport, ComponentReport, EdgeReport, LoadReport
from vllm_h3_quant.methods.record import decision_of
from vllm_h3_quant.methods.scope import Storage
from vllm_h3_quant.upstream import dit_block
from vllm_h3_quant.upstream.attention import layers


def survey(model: Module, method: str | None, checkpoints: Mapping[str, str] | None = None) -> LoadReport:
    """Count the linears and attention layers of ``model`` by its direct children.

    Args:
        model: the pipeline.
        method: what was asked for.
        checkpoints: what each component was loaded from, in words.
    """
    linears = _by_component((name, m) for name, m in model.named_modules() if isinstance(m, LinearBase))
    attention = _by_component(layers(model))
    blocks = _by_component(dit_block.blocks(model))
    return LoadReport(
        method=method,
        components={
            name: _component(found, attention.get(name, []), blocks.get(name, [])).model_copy(
                update={"checkpoint": (checkpoints or {}).get(name, "")}
            )
            for name, found in linears.items()
        },
    )


def _by_component(named: Iterable[tuple[str, Any]]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = defaultdict(list)
    for name, module in named:
        found[name.split(".", 1)[0]].append(module)
    return found


def _component(linears: list[LinearBase], attention: list[Any], blocks: list[Any]) -> ComponentReport:
    decided = [(layer, decision) for layer in linears if (decision := decision_of(layer)) is not None]
    of = {storage: [layer for layer, decision in decided if decision.storage is storage] for storage in Storage}
    hosted = of[Storage.HOST]
    return ComponentReport(
        linears=len(linears),
        quantized=len(of[Storage.CODES]),
        kernels=dict(Counter(layer.quant_method.backend.name for layer in of[Storage.CODES])),
        weight_bytes=sum(p.numel() * p.element_size() for layer in linears for p in layer.parameters(recurse=False)),
        hosted=len(hosted),
        hosted_bytes=sum(layer.weight.numel() * layer.weight.element_size() for layer in hosted),
        kept=dict(Counter(decision.reason for _, decision in decided if decision.storage is Storage.VALUES)),
        attention=_attention(attention),
        fusion=_fusion([obstacles(block) for block in blocks if wants_fusion(block)]),
    )


def _fusion(blocks: list[dict[Edge, str | None]]) -> EdgeReport:
    found = [(edge, reason) for block in blocks for edge, reason in block.items()]
    return EdgeReport(
        edges=len(found),
        fused=sum(reason is None for _, reason in found),
        kept=dict(Counter(f"{edge.value} ({reason})" for edge, reason in found if reason)),
    )


def _attention(layers: list[Any]) -> AttentionReport:
    decisions = [decision for layer in layers if (decision := attention_layers.decision_of(layer)) is not None]
    served = [decision for decision in decisions if decision.kind is not None]
    return AttentionReport(
        layers=len(layers),
        quantized=len(served),
        kernels=dict(Counter(decision.kernel for decision in served)),
        kept=dict(Counter(decision.reason for decision in decisions if decision.kind is None)),
        why=next((decision.why for decision in decisions), ""),
    )
