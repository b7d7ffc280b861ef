"""Refuses an engine's configuration that a method of this package cannot serve, before anything is built.

Offload is judged by :mod:`vllm_h3_quant.dlo.guard`; here stand the dtype of the activations and the way ranks get their
weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from vllm_h3_quant.config.schema import H3QuantOptions
from vllm_h3_quant.dlo import guard as offload
from vllm_h3_quant.errors import H3QuantError

_FLOAT16 = "public reports of MiniMax-H3 in float16 end in NaN or a black clip"
_UNPROVEN = "nobody compared this dtype"


def check(od_config: Any) -> None:
    """Refuse an engine's configuration; one without a method of this package is not looked at.

    Raises:
        H3QuantError: see :func:`vllm_h3_quant.dlo.guard.check`, :func:`refuse_dtype` and :func:`refuse_broadcast`.
    """
    offload.check(od_config)
    quantization = od_config.quantization_config
    method = next((config.get_name() for config in _configs(quantization) if _is_ours(config)), None)
    if method is None:
        return
    refuse_dtype(od_config.dtype, method)
    if od_config.enable_broadcast_weight_load:
        parallel = od_config.parallel_config
        if parallel.use_hsdp and parallel.world_size > 1:
            refuse_broadcast(quantization)


def refuse_dtype(dtype: torch.dtype | None, method: str) -> None:
    """Refuse activations of another dtype than bfloat16; None is the engine's default, which is that.

    Raises:
        H3QuantError: ``dtype`` is another one.
    """
    if dtype in (None, torch.bfloat16):
        return
    name = str(dtype).removeprefix("torch.")
    why = _FLOAT16 if dtype is torch.float16 else _UNPROVEN
    raise H3QuantError(
        f"dtype={name!r}: {method} takes activations in bfloat16 alone, {why}; use --dtype bfloat16 (dtype='bfloat16')"
        " or leave it out"
    )


def refuse_broadcast(quantization: Any) -> None:
    """Refuse an export whose weights one rank of HSDP would read and send to the others.

    vLLM-Omni 0.30 then calls ``load_weights`` on rank 0 alone and sends the parameters that a rank has after it was
    built. Those that become codes are on the meta device until they are read, so that the other ranks would have
    nothing to receive into. With a method that quantizes while it loads, the engine leaves the option out by itself.

    Raises:
        H3QuantError: every quantized component's weights are stored as codes.
    """
    if getattr(quantization, "is_checkpoint_quantized", False):
        raise H3QuantError(
            "enable_broadcast_weight_load: every rank reads an exported checkpoint by itself; remove"
            " --enable-broadcast-weight-load (enable_broadcast_weight_load=False)"
        )


def _configs(quantization: Any) -> Iterator[Any]:
    if hasattr(quantization, "component_configs"):
        yield from (*quantization.component_configs.values(), quantization.default_config)
    else:
        yield quantization


def _is_ours(config: Any) -> bool:
    return isinstance(getattr(config, "options", None), H3QuantOptions)
