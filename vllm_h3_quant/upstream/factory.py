"""Routes component mappings and misspelt method names of ours to this package.

Why: upstream's factory takes a component mapping only if one value is no string, resolves names
without a boundary and keeps silent about unknown ones; and its error for an unknown method lists
every method of vLLM without the nearest.
Symbols: ``_is_per_component_dict(spec)``, ``_build_component_config(spec)`` and
``_build_single(method, **kwargs)`` in ``vllm_omni.quantization.factory``, vLLM-Omni 0.30.0. The public
``build_quant_config`` looks them up in its module at each call.
When they move: check how ``build_quant_config`` tells a component mapping from a plain one.
Mappings and names that are not ours go to the original functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from vllm_h3_quant.upstream.preflight import Symbol, problem

_MODULE = "vllm_omni.quantization.factory"
SYMBOLS = (
    Symbol("vllm-omni", _MODULE, "_is_per_component_dict", ("spec",)),
    Symbol("vllm-omni", _MODULE, "_build_component_config", ("spec",)),
    Symbol("vllm-omni", _MODULE, "_build_single", ("method", "kwargs")),
    Symbol("vllm-omni", _MODULE, "register_quantization_override", ("method", "builder")),
)

Builder = Callable[..., QuantizationConfig]
_installed = False


def register(builders: Mapping[str, Builder]) -> None:
    """Register method names through upstream's public override table."""
    from vllm_omni.quantization import register_quantization_override

    for name, builder in builders.items():
        register_quantization_override(name, builder)


def route(
    claims: Callable[[Mapping[str, Any]], bool],
    build_components: Callable[[Mapping[str, Any]], QuantizationConfig],
    claims_name: Callable[[str], bool],
    build_named: Builder,
) -> None:
    """Send mappings that ``claims`` accepts and names that ``claims_name`` accepts to our builders.

    Where a symbol has moved nothing is routed: other models start as ever, and our own builders, which
    are registered by name, refuse.
    """
    global _installed
    if _installed or any(map(problem, SYMBOLS)):
        return
    from vllm_omni.quantization import factory

    is_component, build_upstream = factory._is_per_component_dict, factory._build_component_config
    build_single = factory._build_single

    @functools.wraps(is_component)
    def is_per_component_dict(spec: dict[str, Any]) -> bool:
        return claims(spec) or is_component(spec)

    @functools.wraps(build_upstream)
    def build_component_config(spec: dict[str, Any]) -> QuantizationConfig:
        return build_components(spec) if claims(spec) else build_upstream(spec)

    @functools.wraps(build_single)
    def build_one(method: str, **kwargs: Any) -> QuantizationConfig:
        return build_named(method, **kwargs) if claims_name(method) else build_single(method, **kwargs)

    factory._is_per_component_dict = is_per_component_dict
    factory._build_component_config = build_component_config
    factory._build_single = build_one
    _installed = True
