"""Moves the AdaLN projections of a loaded pipeline to the host and keeps their outputs ahead of its requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn import Module

from vllm_h3_quant.dlo.adaln import HostedAdaln, Kinds
from vllm_h3_quant.dlo.device import Device
from vllm_h3_quant.upstream import adaln


def host_projections(pipeline: Module, is_hosted: Callable[[Any], bool], device: Device) -> dict[str, HostedAdaln]:
    """Serve the outputs of every DiT's projections whose linear ``is_hosted``.

    Returns:
        What serves them, by the name of the DiT in the pipeline.
    """
    served = {}
    for name, transformer in adaln.transformers(pipeline).items():
        found = adaln.projections(transformer)
        hosted = {key: projection for key, projection in found.items() if is_hosted(projection.linear)}
        if not hosted:
            continue
        rest = transformer.adaln_cache if len(hosted) < len(found) else None
        served[name] = HostedAdaln(hosted, rest, adaln.embedder(transformer, device.torch), device)
        adaln.replace_cache(transformer, served[name])
    if served:
        adaln.announce_schedules(_announce)
    return served


def _announce(transformer: Any, identity: object, kinds: Callable[[], Kinds]) -> None:
    cache = getattr(transformer, "adaln_cache", None)
    if isinstance(cache, HostedAdaln):
        cache.announce(identity, kinds)
