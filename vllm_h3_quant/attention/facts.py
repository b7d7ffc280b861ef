"""What a decision about attention needs to know, read from the engine's layer and from this process's device."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from vllm.platforms import current_platform

from vllm_h3_quant.attention.decision import DeviceFacts, LayerFacts
from vllm_h3_quant.methods.device import device_capability, device_name

_PLACE = re.compile(r"(token_refiner\.)?blocks\.(\d+)\.attn")


def is_served_platform() -> bool:
    """Whether 8-bit attention is this package's here. Elsewhere it is the engine's: Ascend has kernels of its own."""
    return bool(current_platform.is_cuda() or current_platform.is_cpu())


@cache
def this_device() -> DeviceFacts:
    """The current device.

    Raises:
        H3QuantError: it is neither a CUDA device nor the CPU.
    """
    return DeviceFacts(device_capability(), device_name())


def layer_facts(layer: Any, parallel_config: Any) -> LayerFacts | None:
    """Facts about an ``Attention`` layer at the end of its construction; None for one outside the DiT's blocks."""
    place = _PLACE.fullmatch(layer.prefix)
    if place is None:
        return None
    spread = not layer.skip_sequence_parallel
    return LayerFacts(
        block=None if place[1] else int(place[2]),
        heads=layer.num_heads,
        kv_heads=layer.num_kv_heads,
        head_size=layer.head_size,
        causal=layer.causal,
        backend=layer.attn_backend.get_name(),
        backend_options=bool(layer.attn_spec is not None and layer.attn_spec.backend_kwargs()),
        ring=spread and parallel_config.ring_degree > 1,
        all_gather=spread and parallel_config.allgather_degree > 1,
    )
