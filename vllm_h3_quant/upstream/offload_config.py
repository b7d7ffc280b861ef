"""Tells which components an engine's configuration offloads by AllGather, as soon as there is a configuration.

Why: the engine looks for online quantization behind AllGather only once the model is built, by a list of its own
methods, and lets a method pass that does not call itself online.
Symbols: ``OmniDiffusionConfig.__post_init__(self)`` and ``.set_tf_model_config(self, tf_config)`` in
``vllm_omni.diffusion.data``, after which offload and quantization are known, and ``resolve_offload(config)`` in
``vllm_omni.diffusion.offloader.config``, vLLM-Omni 0.30.0. When they move: look for where a configuration of
quantization that a checkpoint brings along is taken over.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vllm_h3_quant.upstream.after_import import after_import
from vllm_h3_quant.upstream.preflight import Symbol, problem

_DATA = "vllm_omni.diffusion.data"
_OFFLOAD = "vllm_omni.diffusion.offloader.config"
SYMBOLS = (
    Symbol("vllm-omni", _DATA, "OmniDiffusionConfig.__post_init__", ("self",)),
    Symbol("vllm-omni", _DATA, "OmniDiffusionConfig.set_tf_model_config", ("self",)),
    Symbol("vllm-omni", _OFFLOAD, "resolve_offload", ("config",)),
)
_COMPONENTS = {"transformer": "dit", "text_encoder": "text_encoder"}
_ORIGINAL = "_h3_quant_original"

Check = Callable[[Any], None]


def check_configurations(check: Check) -> None:
    """Call ``check(od_config)`` with each engine configuration that is made from now on, in this process.

    A second call replaces the first. Where a symbol has moved nothing is called, and our own builders refuse.
    """
    after_import(_DATA, lambda: _install(check))


def gathered(od_config: Any) -> tuple[dict[str, str], bool]:
    """The engine's name of each component offloaded by AllGather; whether ``diffusion_offload_config`` asked for it."""
    from vllm_omni.diffusion.offloader.config import OffloadStrategy, resolve_offload

    resolved = resolve_offload(od_config)
    if resolved.strategy is not OffloadStrategy.DISTRIBUTED_LAYER_WISE:
        return {}, False
    found = {
        ours: name for ours, name in _COMPONENTS.items() if resolved.offloads(name) and resolved.uses_allgather(name)
    }
    return found, resolved.public is not None


def _install(check: Check) -> None:
    from vllm_omni.diffusion.data import OmniDiffusionConfig

    # The other symbol's module cannot be imported yet: this one is imported in the middle of its dependencies.
    if any(problem(symbol) for symbol in SYMBOLS if symbol.module == _DATA):
        return
    for name in ("__post_init__", "set_tf_model_config"):
        setattr(OmniDiffusionConfig, name, _followed_by(check, getattr(OmniDiffusionConfig, name)))


def _followed_by(check: Check, current: Callable[..., Any]) -> Callable[..., Any]:
    original = getattr(current, _ORIGINAL, current)

    @functools.wraps(original)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        check(self)
        return result

    setattr(checked, _ORIGINAL, original)
    return checked
