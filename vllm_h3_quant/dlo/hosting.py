"""Moves the AdaLN projections of a loaded pipeline to the host and keeps their outputs ahead of its requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import Module

from vllm_h3_quant.dlo.adaln import HostedAdaln, Schedule
from vllm_h3_quant.dlo.device import Device
from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.upstream import adaln


def host_projections(pipeline: Module, is_hosted: Callable[[Any], bool], device: Device) -> dict[str, HostedAdaln]:
    """Serve the outputs of every DiT's projections whose linear ``is_hosted``.

    Returns:
        What serves them, by the name of the DiT in the pipeline.

    Raises:
        H3QuantError: a DiT has outputs from a file already.
    """
    served = {}
    for name, transformer in adaln.transformers(pipeline).items():
        found = adaln.projections(transformer)
        hosted = {key: projection for key, projection in found.items() if is_hosted(projection.linear)}
        if not hosted:
            continue
        if getattr(transformer.adaln_cache, "sidecar", None) is not None:
            raise H3QuantError(
                f"{name}: adaln='host' computes what minimax_h3_adaln_cache_path holds; remove the path, or use"
                " adaln='keep'"
            )
        rest = transformer.adaln_cache if len(hosted) < len(found) else None
        served[name] = HostedAdaln(hosted, rest, adaln.embedder(transformer, device.torch), device)
        adaln.replace_cache(transformer, served[name])
    if served:
        adaln.announce_schedules(_announce)
    return served


def _announce(transformer: Any, identity: object, plans: Callable[[], list[Sequence[torch.Tensor]]]) -> None:
    cache = getattr(transformer, "adaln_cache", None)
    if isinstance(cache, HostedAdaln) and not cache.knows(identity):
        cache.announce(Schedule(identity, plans()))
