"""Attention layers of the engine, built as its models build them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from vllm_h3_quant.attention.layers import decide_layer, quantized_attention
from vllm_h3_quant.upstream.attention import install


@pytest.fixture
def build_layer() -> Iterator[Callable[..., Any]]:
    """``build_layer(od_config, prefix=..., **more)``: an ``Attention`` layer with 2 heads of 64."""
    from vllm_omni.diffusion.attention.layer import Attention
    from vllm_omni.diffusion.config import set_current_diffusion_config

    before = Attention._init_kv_cache_quantization
    install(decide_layer, quantized_attention)

    def build(config: Any, prefix: str = "blocks.1.attn", **more: Any) -> Any:
        with set_current_diffusion_config(config):
            return Attention(
                **{"num_heads": 2, "head_size": 64, "causal": False, "softmax_scale": 0.125, "prefix": prefix, **more}
            )

    yield build
    Attention._init_kv_cache_quantization = before
