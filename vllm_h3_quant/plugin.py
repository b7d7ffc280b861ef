"""Entry points. Importing this module costs nothing; each function registers once and returns.

======================================  ====================================================
entry point                             runs
======================================  ====================================================
``vllm_omni.platform_plugins`` (early)  when vLLM-Omni first resolves its platform, before a
                                        method name on the command line is built
``vllm_omni.general_plugins``           in process 0 and every worker, at start
``vllm_omni.platform_plugins`` (cpu)    the CPU reference platform, where no accelerator is
``vllm.platform_plugins`` (cpu)         the same choice for vLLM
======================================  ====================================================
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any


def register_early() -> None:
    """Register the method names and claim no platform.

    vLLM-Omni drops exceptions of this hook; :func:`register` runs again later and raises them.
    """
    register()


def register() -> None:
    """Register the method names and the component form with vLLM-Omni's factory, and the checks of a start."""
    from functools import partial

    from vllm_h3_quant.config import names
    from vllm_h3_quant.upstream import factory, offload_config, startup

    factory.register({name: partial(_build, name) for name in names.served()})
    factory.route(_claims, _build_components, names.looks_ours, _build)
    offload_config.check_configurations(_check)
    startup.install(_check_start, _explain_start)


def register_general() -> None:
    """:func:`register`, the engine's own attention option for MiniMax-H3, and the load report where asked for."""
    register()
    from vllm_h3_quant.upstream import attention

    attention.install_on_import(_decide_attention, _quantized_attention)
    if os.environ.get("VLLM_H3_QUANT_REPORT"):
        from vllm_h3_quant.engine import load_session

        load_session.prepare([])


def cpu_omni_platform() -> str | None:
    """vLLM-Omni's platform: the CPU reference one where it was asked for or nothing else is there."""
    from vllm_omni.platforms import builtin_omni_platform_plugins

    if _cpu_asked() or not any(probe() for probe in builtin_omni_platform_plugins.values()):
        return "vllm_h3_quant.platforms.cpu.CpuOmniPlatform"
    return None


def cpu_platform() -> str | None:
    """vLLM's platform, by the same rule. An explicit CPU target vLLM decides by itself."""
    from vllm.platforms import builtin_platform_plugins

    if _cpu_asked() or any(probe() for probe in builtin_platform_plugins.values()):
        return None
    return "vllm.platforms.cpu.CpuPlatform"


def _cpu_asked() -> bool:
    return os.environ.get("VLLM_TARGET_DEVICE", "").lower() == "cpu"


def _decide_attention(layer: Any, od_config: Any) -> Any:
    from vllm_h3_quant.attention.layers import decide_layer
    from vllm_h3_quant.engine.load_session import prepare_without

    decision = decide_layer(layer, od_config)
    if decision is not None:
        prepare_without(od_config)
    return decision


def _quantized_attention(layer: Any, decision: Any) -> Any:
    from vllm_h3_quant.attention.layers import quantized_attention

    return quantized_attention(layer, decision)


def _build(method: str, **options: Any) -> Any:
    from vllm_h3_quant.engine.quant_config import build

    return build(method, options, where=f"quantization {method!r}")


def _check(od_config: Any) -> None:
    from vllm_h3_quant.engine.guard import check

    check(od_config)


def _check_start(arguments: Mapping[str, Any]) -> None:
    from vllm_h3_quant.engine.start import check

    check(arguments)


def _explain_start(arguments: Mapping[str, Any]) -> str | None:
    from vllm_h3_quant.engine.start import explain

    return explain(arguments)


def _claims(spec: Mapping[str, Any]) -> bool:
    from vllm_h3_quant.config.names import claims_components

    return claims_components(spec)


def _build_components(spec: Mapping[str, Any]) -> Any:
    from vllm_h3_quant.engine.components import build_components

    return build_components(spec)
