"""Counts a loaded pipeline's linears for the load report."""

from __future__ import annotations

from collections import Counter

from torch.nn import Module
from vllm.model_executor.layers.linear import LinearBase

from vllm_h3_quant.methods.base import H3LinearMethod
from vllm_h3_quant.report import ComponentReport, LoadReport


def survey(model: Module, method: str | None) -> LoadReport:
    """Count the linears of ``model`` by its direct children."""
    layers: dict[str, list[LinearBase]] = {}
    for name, module in model.named_modules():
        if isinstance(module, LinearBase):
            layers.setdefault(name.split(".", 1)[0], []).append(module)
    return LoadReport(method=method, components={name: _component(found) for name, found in layers.items()})


def _component(linears: list[LinearBase]) -> ComponentReport:
    methods = [layer.quant_method for layer in linears if isinstance(layer.quant_method, H3LinearMethod)]
    return ComponentReport(
        linears=len(linears),
        quantized=len(methods),
        kernels=dict(Counter(method.backend.name for method in methods)),
        weight_bytes=sum(p.numel() * p.element_size() for layer in linears for p in layer.parameters(recurse=False)),
    )
