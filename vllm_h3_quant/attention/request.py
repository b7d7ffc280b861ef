"""What was asked of the DiT's attention, by a configuration of this package or by the engine's own option."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm_h3_quant.config import selector
from vllm_h3_quant.config.components import TRANSFORMER
from vllm_h3_quant.config.schema import NO_ATTENTION, H3QuantOptions, Method
from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.kernels.attention import KINDS

KV_CACHE_DTYPE = "diffusion_kv_cache_dtype"
_NOT_GIVEN = (None, "auto")


@dataclass(frozen=True)
class AttentionRequest:
    """8-bit attention as asked for.

    Attributes:
        source: the key and value that asked, for messages.
        kind: one of ``kernels.attention.KINDS``, or ``auto``.
        method: of the linears beside it, which says what error ``auto`` accepts; None without a configuration of ours.
        named_blocks: blocks that this package's selector names; each must exist.
        skipped_blocks: blocks that keep the engine's attention: those, and the engine's own selector's.
        skipped_steps: steps of this package's selector. The engine's own come with each call.
        token_refiner: whether the token refiner is served too.
        by_engine_option: whether the engine's own option asked, which the engine refuses where nothing serves it.
    """

    source: str
    kind: str
    method: Method | None = None
    named_blocks: frozenset[int] = frozenset()
    skipped_blocks: frozenset[int] = frozenset()
    skipped_steps: frozenset[int] = frozenset()
    token_refiner: bool = False
    by_engine_option: bool = False


def combine(
    options: H3QuantOptions | None, kv_cache_dtype: str | None, skipped_blocks: frozenset[int] = frozenset()
) -> AttentionRequest | None:
    """The request in the transformer's configuration and the engine's own option; None for the engine's attention.

    Args:
        options: of the transformer; None where it has no configuration of this package.
        kv_cache_dtype: value of the engine's option.
        skipped_blocks: blocks that the engine's option leaves out.

    Raises:
        H3QuantError: both ask, and for different things.
    """
    both = kv_cache_dtype in KINDS
    if options is None or options.attention == NO_ATTENTION:
        if kv_cache_dtype is None or not both:
            return None
        source = f"{KV_CACHE_DTYPE}={kv_cache_dtype!r}"
        return AttentionRequest(source, kv_cache_dtype, skipped_blocks=skipped_blocks, by_engine_option=True)
    kind = options.attention
    if kv_cache_dtype not in (*_NOT_GIVEN, kind):
        raise H3QuantError(
            f"{KV_CACHE_DTYPE}={kv_cache_dtype!r} and attention={kind!r} of the quantization config ask for different"
            " attention; leave one of them out"
        )
    named = selector.indices(options.attention_skip_layers)
    return AttentionRequest(
        source=f"attention={kind!r}",
        kind=kind,
        method=options.method,
        named_blocks=named,
        skipped_blocks=named | (skipped_blocks if both else frozenset()),
        skipped_steps=selector.indices(options.attention_skip_steps),
        token_refiner=options.attention_token_refiner,
        by_engine_option=both,
    )


def request_of(od_config: Any) -> AttentionRequest | None:
    """:func:`combine` of what an ``OmniDiffusionConfig`` holds."""
    return combine(
        _transformer_options(od_config.quantization_config),
        od_config.diffusion_kv_cache_dtype,
        frozenset(od_config.diffusion_kv_cache_skip_layer_indices or ()),
    )


def _transformer_options(quantization_config: Any) -> H3QuantOptions | None:
    by_component = getattr(quantization_config, "resolve", None)
    config = quantization_config if by_component is None else by_component(TRANSFORMER)
    options = getattr(config, "options", None)
    return options if isinstance(options, H3QuantOptions) else None
