"""Lets this package replace the implementation inside MiniMax-H3's attention layers.

Why: upstream's table of backends is closed, ``impl_overrides`` belongs to the model's author, and
``diffusion_kv_cache_dtype`` is refused on every platform but one. The layer keeps everything around the
implementation: sequence parallelism, its skip selectors, the boundary to ``torch.compile``.
Symbols, vLLM-Omni 0.30.0: ``Attention._init_kv_cache_quantization(self, config)`` in
``vllm_omni.diffusion.attention.layer`` is the last statement of ``Attention.__init__``, when
``self.attention``, ``attn_backend``, ``attn_spec``, ``layer_idx``, ``prefix``, ``causal``, ``num_heads``,
``num_kv_heads``, ``head_size``, ``skip_sequence_parallel``, ``parallel_strategy`` and ``_has_custom_attention``
are set; it asks ``self.attention.supports_kv_cache_dtype``. ``Attention._with_kv_cache_dtype(attn_metadata)`` puts
``extra["kv_cache_dtype"]``, which is ``"float"`` where upstream's selectors skip. ``denoise_step_idx`` of
``ForwardContext`` is read at each call, and of the metadata what ``MiniMaxH3Attention._run_packed_attention``
puts there: ``cu_seqlens_q`` and ``_k``, ``max_seqlen_q`` and ``_k``, ``valid_kv_length``, ``attn_mask``.
When they move: check what ``Attention.forward`` calls after the all-to-all, and that the mask of
``_run_packed_attention`` still says no more than ``cu_seqlens``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch.nn import Module

from vllm_h3_quant.upstream.after_import import after_import
from vllm_h3_quant.upstream.preflight import Symbol, problem

_LAYER = "vllm_omni.diffusion.attention.layer"
_CONTEXT = "vllm_omni.diffusion.forward_context"
SYMBOLS = (
    Symbol("vllm-omni", _LAYER, "Attention._init_kv_cache_quantization", ("self", "config")),
    Symbol("vllm-omni", _LAYER, "Attention._with_kv_cache_dtype", ("attn_metadata",)),
    Symbol("vllm-omni", "vllm_omni.diffusion.attention.parallel.base", "NoParallelAttention"),
    Symbol("vllm-omni", _CONTEXT, "ForwardContext.denoise_step_idx"),
    Symbol(
        "vllm-omni",
        "vllm_omni.diffusion.attention.backends.abstract",
        "AttentionImpl.supports_kv_cache_dtype",
        ("kv_cache_dtype", "platform_key"),
    ),
)

MODEL_CLASSES = ("MiniMaxH3Pipeline", "MiniMaxH3ModularPipeline")
"""``model_class_name`` of MiniMax-H3: the pipeline, and its alias in the released ``model_index.json``."""

_ORIGINAL = "_h3_quant_original"
_DECISION = "_h3_quant_decision"


Decide = Callable[[Any, Any], Any]
"""``decide(layer, od_config)``: what becomes of a layer, kept on it; None leaves it alone."""

CarryOut = Callable[[Any, Any], Any]
"""``carry_out(layer, decision)``: an ``AttentionImpl`` in place of the layer's own, or None to keep that."""


def install(decide: Decide, carry_out: CarryOut) -> None:
    """Ask ``decide`` at the end of the construction of each of MiniMax-H3's attention layers, and do what it says.

    Other models and custom kernels go to upstream as they are. A second call replaces both functions.
    """
    from vllm_omni.diffusion.attention.layer import Attention

    wrapped = Attention._init_kv_cache_quantization
    original = getattr(wrapped, _ORIGINAL, wrapped)

    @functools.wraps(original)
    def init_kv_cache_quantization(self: Any, config: Any) -> None:
        serves = getattr(config, "model_class_name", None) in MODEL_CLASSES and not self._has_custom_attention
        decision = decide(self, config) if serves else None
        if decision is not None:
            setattr(self, _DECISION, decision)
            implementation = carry_out(self, decision)
            if implementation is not None:
                self.attention = implementation
            else:
                # An attention dtype given for the whole model is no error in a layer that stays as it is.
                self.attention.supports_kv_cache_dtype = lambda kv_cache_dtype, platform_key: True
        original(self, config)

    setattr(init_kv_cache_quantization, _ORIGINAL, original)
    Attention._init_kv_cache_quantization = init_kv_cache_quantization


def install_on_import(decide: Decide, carry_out: CarryOut) -> None:
    """:func:`install`, as soon as something imports the layer.

    Where a symbol has moved nothing is installed: upstream then refuses ``diffusion_kv_cache_dtype`` itself,
    and configurations of this package are refused with the versions.
    """

    def action() -> None:
        if not any(map(problem, SYMBOLS)):
            install(decide, carry_out)

    after_import(_LAYER, action)


def layers(model: Module) -> Iterator[tuple[str, Any]]:
    """Names and attention layers of a model."""
    from vllm_omni.diffusion.attention.layer import Attention

    for name, module in model.named_modules():
        if isinstance(module, Attention):
            yield name, module


def decision_of(layer: Any) -> Any:
    """What was decided for a layer, or None where nothing was asked."""
    return getattr(layer, _DECISION, None)


def exchanges(layer: Any) -> bool:
    """Whether a layer's operands travel between ranks before its implementation sees them."""
    from vllm_omni.diffusion.attention.parallel.base import NoParallelAttention

    return not layer.skip_sequence_parallel and not isinstance(layer.parallel_strategy, NoParallelAttention)


def left_out_by_engine(layer: Any) -> bool:
    """Whether the engine's own selectors leave the running step or the layer out of 8-bit attention."""
    return says_float(layer._with_kv_cache_dtype(None))


def says_float(metadata: Any) -> bool:
    """Whether a call's metadata says that the engine's own selectors leave it out of 8-bit attention."""
    return metadata is not None and metadata.extra.get("kv_cache_dtype") == "float"


def denoise_step() -> int | None:
    """The denoising step of the running forward; None outside one, and where requests at several are packed."""
    from vllm_omni.diffusion.forward_context import get_forward_context, is_forward_context_available

    return get_forward_context().denoise_step_idx if is_forward_context_available() else None
