"""Runs checks before and after the diffusion loader reads a pipeline's weights.

Why: between the construction of a pipeline and the first tensor there is no public hook, and that is
the moment when a wrong layer name can be reported and biases can be watched.
Symbols: ``vllm_omni.diffusion.model_loader.diffusers_loader.DiffusersPipelineLoader.load_weights(self,
model, *, ...)``, vLLM-Omni 0.30.0. Every path of ``load_model`` that reads
weights goes through it, except the mapped plan, which the loader does not take for online methods.
When it moves: check that the model is complete before the call and quantized after it.
``_already_called_process_weights_after_loading``, vLLM 0.30.0, is what the final sweeps of both engines look for on a
layer. When it moves: a method is called again for a layer that it has finished, which the methods here allow.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.nn import Module

from vllm_h3_quant.upstream.preflight import Symbol

SYMBOLS = (
    Symbol(
        "vllm-omni",
        "vllm_omni.diffusion.model_loader.diffusers_loader",
        "DiffusersPipelineLoader.load_weights",
        ("self", "model"),
    ),
)

_DONE = "_already_called_process_weights_after_loading"

Hook = Callable[[Any, Module], None]
_ORIGINAL = "_h3_quant_original"


def around_load_weights(before: Hook, after: Hook) -> None:
    """Call ``before(loader, model)`` and ``after(loader, model)`` around each load of weights.

    A second call replaces the hooks of the first.
    """
    from vllm_omni.diffusion.model_loader.diffusers_loader import DiffusersPipelineLoader

    original = getattr(DiffusersPipelineLoader.load_weights, _ORIGINAL, DiffusersPipelineLoader.load_weights)

    @functools.wraps(original)
    def load_weights(self: Any, model: Module, *args: Any, **kwargs: Any) -> Any:
        before(self, model)
        result = original(self, model, *args, **kwargs)
        after(self, model)
        return result

    setattr(load_weights, _ORIGINAL, original)
    DiffusersPipelineLoader.load_weights = load_weights


def mark_processed(layer: Module) -> None:
    """Tell the engine's final sweep that the weights of ``layer`` are what they are to be."""
    setattr(layer, _DONE, True)


def is_processed(layer: Module) -> bool:
    """Whether :func:`mark_processed` or the engine has marked ``layer``."""
    return bool(getattr(layer, _DONE, False))
