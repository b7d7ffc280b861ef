"""Refuses offload by AllGather of weights that are quantized while they load.

AllGather offload gives each rank a slice of a block's bytes and puts the slices together before the block runs. What a
rank quantizes by itself is its own: ranks round alike only as long as device, kernel and shard are, and the engine
checks none of it. Codes of an exported checkpoint are the same bytes for every rank and may be gathered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_h3_quant.config import H3QuantOptions
from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.upstream.offload_config import gathered


def check(od_config: Any) -> None:
    """Refuse what an engine's configuration asks for and cannot work, before anything is built.

    Raises:
        H3QuantError: see :func:`refuse_allgather`.
    """
    if od_config.quantization_config is not None:
        components, public = gathered(od_config)
        refuse_allgather(components, od_config.quantization_config, public=public)


def refuse_allgather(gathered: Mapping[str, str], quantization: Any, *, public: bool) -> None:
    """Refuse a component that is offloaded by AllGather and quantized while it loads.

    Args:
        gathered: the engine's own name of each component whose blocks are gathered, whatever the number of ranks: what
            works on one GPU by chance fails on two.
        quantization: the engine's quantization configuration, or None.
        public: whether ``diffusion_offload_config`` asked for it, rather than the older flags.

    Raises:
        H3QuantError: the first such component, with its method and both ways out.
    """
    for component, name in gathered.items():
        config = quantization.resolve(component) if hasattr(quantization, "component_configs") else quantization
        options = getattr(config, "options", None)
        if not isinstance(options, H3QuantOptions) or options.checkpoint:
            continue
        method = config.get_name()
        if public:
            instead = f'"layer_options": {{"{name}": {{"weight_transfer": "rank-local"}}}} in diffusion_offload_config'
        else:
            instead = "--dlo-no-use-allgather (dlo_use_allgather=False)"
        raise H3QuantError(
            f"component {component!r}: {method} quantizes while it loads and cannot be offloaded by AllGather; use"
            f" {instead}, or serve an exported checkpoint (vllm-h3-quant export MODEL OUT --method {method})"
        )
