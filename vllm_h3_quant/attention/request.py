"""What was asked of the DiT's attention, by a configuration of this package or by the engine's own option."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.platforms import current_platform

from vllm_h3_quant.attention.device import Choice, choice_for
from vllm_h3_quant.config import selector
from vllm_h3_quant.config.schema import NO_ATTENTION, H3QuantOptions, Method
from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.kernels.attention import KINDS
from vllm_h3_quant.methods.scope import TRANSFORMER

KV_CACHE_DTYPE = "diffusion_kv_cache_dtype"
_NOT_GIVEN = (None, "auto")


@dataclass(frozen=True)
class AttentionRequest:
    """8-bit attention as asked for.

    Attributes:
        source: the key and value that asked, for messages.
        choice: what that means on this device.
        named_blocks: blocks that this package's selector names; each must exist.
        skipped_blocks: blocks that keep the engine's attention: those, and the engine's own selector's.
        skipped_steps: steps of this package's selector. The engine's own come with each call.
        token_refiner: whether the token refiner is served too.
        by_engine_option: whether the engine's own option asked, which the engine refuses where nothing serves it.
    """

    source: str
    choice: Choice
    named_blocks: frozenset[int] = frozenset()
    skipped_blocks: frozenset[int] = frozenset()
    skipped_steps: frozenset[int] = frozenset()
    token_refiner: bool = False
    by_engine_option: bool = False


def request_of(od_config: Any) -> AttentionRequest | None:
    """The request in an ``OmniDiffusionConfig``; None for the engine's attention.

    Raises:
        H3QuantError: both places ask, and for different things; or the device cannot.
    """
    options = _transformer_options(od_config.quantization_config)
    ours = NO_ATTENTION if options is None else options.attention
    engines = od_config.diffusion_kv_cache_dtype
    if ours == NO_ATTENTION:
        return _engine_option(od_config, engines) if engines in KINDS and _is_served_platform() else None
    assert options is not None
    if engines not in (*_NOT_GIVEN, ours):
        raise H3QuantError(
            f"{KV_CACHE_DTYPE}={engines!r} and attention={ours!r} of the quantization config ask for different"
            " attention; leave one of them out"
        )
    named = selector.indices(options.attention_skip_layers)
    both = engines in KINDS
    return AttentionRequest(
        source=f"attention={ours!r}",
        choice=choice_for(ours, options.method),
        named_blocks=named,
        skipped_blocks=named | (_engine_blocks(od_config) if both else frozenset()),
        skipped_steps=selector.indices(options.attention_skip_steps),
        token_refiner=options.attention_token_refiner,
        by_engine_option=both,
    )


def _engine_option(od_config: Any, dtype: str) -> AttentionRequest:
    return AttentionRequest(
        source=f"{KV_CACHE_DTYPE}={dtype!r}",
        choice=choice_for(dtype, Method.FP8),
        skipped_blocks=_engine_blocks(od_config),
        by_engine_option=True,
    )


def _engine_blocks(od_config: Any) -> frozenset[int]:
    return frozenset(od_config.diffusion_kv_cache_skip_layer_indices or ())


def _is_served_platform() -> bool:
    # Elsewhere the option is the engine's: Ascend has kernels of its own for it.
    return current_platform.is_cuda() or current_platform.is_cpu()


def _transformer_options(quantization_config: Any) -> H3QuantOptions | None:
    by_component = getattr(quantization_config, "resolve", None)
    config = quantization_config if by_component is None else by_component(TRANSFORMER)
    options = getattr(config, "options", None)
    return options if isinstance(options, H3QuantOptions) else None
