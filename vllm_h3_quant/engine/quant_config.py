"""The face towards vLLM: a ``QuantizationConfig`` that hands each linear its method."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from vllm_h3_quant.attention.decision import on_device
from vllm_h3_quant.attention.facts import this_device
from vllm_h3_quant.config import names
from vllm_h3_quant.config.components import read_method
from vllm_h3_quant.config.schema import NO_ATTENTION, H3QuantOptions, Method
from vllm_h3_quant.engine import load_session
from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.log import get_logger
from vllm_h3_quant.methods.base import H3LinearMethod
from vllm_h3_quant.methods.device import backend_for, lowest_capability
from vllm_h3_quant.methods.fp8 import H3Fp8LinearMethod
from vllm_h3_quant.methods.hosted import HostedLinearMethod
from vllm_h3_quant.methods.int8 import H3Int8LinearMethod
from vllm_h3_quant.methods.record import record
from vllm_h3_quant.methods.scope import Storage, decide
from vllm_h3_quant.upstream import (
    adaln,
    attention,
    curve,
    dit_block,
    factory,
    lora,
    model_loader,
    offload,
    offload_config,
    preflight,
    process_store,
    weight_source,
)
from vllm_h3_quant.upstream.process_store import process_store as rank_store

logger = get_logger(__name__)

LINEAR_METHODS: dict[Method, type[H3LinearMethod]] = {
    Method.FP8: H3Fp8LinearMethod,
    Method.INT8: H3Int8LinearMethod,
}


class H3QuantConfig(QuantizationConfig):
    """Quantization of one component, or of every component it is handed to.

    It crosses process boundaries by pickle: what it holds beside the options is the record of the
    names it was asked about, which starts empty in each process.

    Args:
        options: what was asked for.
        where: where it was given, for errors.
    """

    def __init__(self, options: H3QuantOptions, *, where: str = "quantization config") -> None:
        super().__init__()
        self.options = options
        self.where = where
        self.seen: list[str] = []
        self.matched: set[str] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.options.model_dump(mode="json"), self.where)

    def get_name(self) -> str:
        return self.options.method.value

    @property
    def ignored_layers(self) -> list[str]:
        """The entries of ``ignored_layers``, a new list each time."""
        return list(self.options.ignored_layers)

    @property
    def is_checkpoint_quantized(self) -> bool:
        """Read by vLLM-Omni: whether weights are stored as codes, so that offloaded ones need not visit the GPU."""
        return bool(self.options.checkpoint)

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def get_min_capability(self) -> int:
        return lowest_capability(self.options.method)

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> H3QuantConfig:
        options = dict(config)
        return build(options.pop("quant_method"), options, where="quantization_config of the checkpoint")

    def maybe_update_config(self, model_name: str, *args: Any, **kwargs: Any) -> None:
        """Called by vLLM-Omni right before it builds the model in a worker."""
        load_session.prepare([self])

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method of a linear; ``UnquantizedLinearMethod`` where it stays as it is.

        What was decided stands on the layer (:mod:`~vllm_h3_quant.methods.record`).

        Raises:
            H3QuantError: the name is not one of MiniMax-H3's linears.
        """
        if not isinstance(layer, LinearBase):
            return None
        decision = decide(self.options, prefix)
        if decision.role is None:
            raise H3QuantError(
                f"{self.where}: {self.get_name()} serves MiniMax-H3 only and does not know the linear {prefix!r};"
                " use the engine's own fp8 or int8 for other models"
            )
        self.seen.append(prefix)
        self.matched.update(decision.entries)
        record(layer, decision)
        if decision.storage is Storage.HOST:
            return HostedLinearMethod(prefix, rank_store())
        if decision.storage is Storage.VALUES:
            return UnquantizedLinearMethod()
        return LINEAR_METHODS[self.options.method](self.options, prefix)


def build(method: str, options: Mapping[str, Any] | None = None, *, where: str) -> H3QuantConfig:
    """A checked configuration for the device of this process.

    Raises:
        H3QuantError: bad name, key or value; a device that cannot run the method; or an installed
            vLLM whose symbols have moved.
    """
    return build_options(read_method(method, options or {}, where=where), method, where=where)


def build_options(options: H3QuantOptions, method: str, *, where: str) -> H3QuantConfig:
    """A configuration for the device of this process, from options that were read from the name ``method``.

    Raises:
        H3QuantError: a device that cannot run them, or an installed vLLM whose symbols have moved.
    """
    if names.normalize(method) in names.replaced():
        logger.info("%s: %s is served by %s (%s)", where, method, options.method.value, names.REPLACE_VARIABLE)
    check_upstream()
    backend_for(options.method)
    if options.attention != NO_ATTENTION:
        _check_attention(options, where)
    return H3QuantConfig(options, where=where)


@cache
def check_upstream() -> None:
    """Refuse, once a process, to work with a vLLM-Omni whose patched symbols have moved."""
    modules = (
        factory,
        model_loader,
        weight_source,
        lora,
        attention,
        dit_block,
        curve,
        offload,
        offload_config,
        adaln,
        process_store,
    )
    preflight.require(symbol for module in modules for symbol in module.SYMBOLS)


def _check_attention(options: H3QuantOptions, where: str) -> None:
    try:
        on_device(options.attention, options.method, this_device())
    except H3QuantError as error:
        raise H3QuantError(f"{where}: {error}") from None


def _rebuild(options: dict[str, Any], where: str) -> H3QuantConfig:
    return H3QuantConfig(H3QuantOptions(**options), where=where)
