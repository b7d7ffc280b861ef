"""Refuses what an engine's configuration asks for and the methods of this package cannot do, before anything is built.

AllGather offload gives each rank a slice of a block's bytes and puts the slices together before the block runs. What a
rank quantizes by itself is its own: ranks round alike only as long as device, kernel and shard are, and the engine
checks none of it. Codes of an exported checkpoint are the same bytes for every rank and may be gathered.

Outputs of AdaLN from a file, which the engine drops with a warning where a DiT is quantized, are refused where AdaLN's
weights are on the host to compute the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_h3_quant.config.schema import H3QuantOptions
from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.upstream.offload_config import gathered

OUTPUT_FILES = ("minimax_h3_adaln_cache_path", "minimax_h3_ref_adaln_cache_path")
"""Keys of the engine's ``cache_config``."""


def check(od_config: Any) -> None:
    """Refuse an engine's configuration.

    Raises:
        H3QuantError: see :func:`refuse_allgather` and :func:`refuse_output_file`.
    """
    if od_config.quantization_config is not None:
        components, public = gathered(od_config)
        refuse_allgather(components, od_config.quantization_config, public=public)
        refuse_output_file(od_config.cache_config, od_config.quantization_config)


def refuse_output_file(cache_config: Any, quantization: Any) -> None:
    """Refuse a file of AdaLN's outputs beside ``adaln="host"``.

    Args:
        cache_config: the engine's, a mapping or an object, or None.
        quantization: the engine's quantization configuration.

    Raises:
        H3QuantError: there are both.
    """
    options = _options(quantization, "transformer")
    if options is None or options.adaln != "host":
        return
    for key in OUTPUT_FILES:
        path = cache_config.get(key) if isinstance(cache_config, Mapping) else getattr(cache_config, key, None)
        if path is not None:
            raise H3QuantError(
                f"cache_config: {key}={str(path)!r} holds what adaln='host' computes; remove the key, or use"
                " adaln='keep'"
            )


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
        options = _options(quantization, component)
        if options is None or options.checkpoint:
            continue
        method = _resolve(quantization, component).get_name()
        if public:
            instead = f'"layer_options": {{"{name}": {{"weight_transfer": "rank-local"}}}} in diffusion_offload_config'
        else:
            instead = "--dlo-no-use-allgather (dlo_use_allgather=False)"
        raise H3QuantError(
            f"component {component!r}: {method} quantizes while it loads and cannot be offloaded by AllGather; use"
            f" {instead}, or serve an exported checkpoint (vllm-h3-quant export MODEL OUT --method {method})"
        )


def _resolve(quantization: Any, component: str) -> Any:
    return quantization.resolve(component) if hasattr(quantization, "component_configs") else quantization


def _options(quantization: Any, component: str) -> H3QuantOptions | None:
    """Of a method of ours."""
    options = getattr(_resolve(quantization, component), "options", None)
    return options if isinstance(options, H3QuantOptions) else None
