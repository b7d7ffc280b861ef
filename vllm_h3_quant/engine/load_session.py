"""Checks and the report around one load of a pipeline's weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch.nn import Module
from vllm.model_executor.layers.linear import LinearBase

from vllm_h3_quant.attention import layers as attention
from vllm_h3_quant.blocks.edges import wants_fusion
from vllm_h3_quant.blocks.forward import forward
from vllm_h3_quant.config.components import TEXT_ENCODER, TRANSFORMER
from vllm_h3_quant.dlo import host_memory
from vllm_h3_quant.dlo.device import Device
from vllm_h3_quant.dlo.hosting import host_projections
from vllm_h3_quant.engine import guard, report
from vllm_h3_quant.engine.survey import survey
from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.loader import intake
from vllm_h3_quant.log import get_logger
from vllm_h3_quant.methods.base import H3LinearMethod
from vllm_h3_quant.methods.hosted import HostedLinearMethod
from vllm_h3_quant.methods.lora import refuse_merging_backend
from vllm_h3_quant.methods.record import decision_of, record
from vllm_h3_quant.methods.scope import decide_unasked, without_match
from vllm_h3_quant.upstream import dit_block, weight_source
from vllm_h3_quant.upstream.attention import install as install_attention
from vllm_h3_quant.upstream.lora import keep_on_device
from vllm_h3_quant.upstream.model_loader import around_load_weights
from vllm_h3_quant.upstream.platform import compute_device, compute_platform

logger = get_logger(__name__)


@runtime_checkable
class AskedConfig(Protocol):
    """What the checks read of a configuration: what was asked of it and what it answered."""

    where: str
    seen: list[str]
    matched: set[str]

    @property
    def ignored_layers(self) -> list[str]: ...

    def get_name(self) -> str: ...


def prepare(configs: Iterable[AskedConfig]) -> None:
    """Put the checks and the report around the next load of weights in this process."""
    asked = list(configs)
    around_load_weights(partial(before_load, asked), partial(after_load, asked))
    if asked:
        install()
        host_memory.install()
        weight_source.install(intake.claim)
        keep_on_device(lambda pipeline: bool(_quantized(pipeline) or _hosted(pipeline)))


def install() -> None:
    """Put this package's attention and blocks into models of MiniMax-H3 that are built from now on."""
    install_attention(attention.decide_layer, attention.quantized_attention)
    dit_block.install(wants_fusion, forward)


def prepare_without(od_config: Any) -> None:
    """:func:`prepare` for an engine without a configuration of this package; one with has been prepared by that."""
    if not _holds_ours(od_config):
        prepare([])


def before_load(configs: Sequence[AskedConfig], loader: Any, model: Module) -> None:
    """Refuse what cannot work now that the model is known and no weight has been read.

    Raises:
        H3QuantError: a LoRA backend that merges with a method of ours, a configuration that reached no linear
            or no attention layer, an ``ignored_layers`` entry or a selected block that matches none, or a checkpoint
            that cannot be loaded.
    """
    od_config = loader.od_config
    guard.check(od_config)
    if not _holds_ours(od_config):
        configs = []  # an engine before this one left them behind in this process
    if configs and _quantized(getattr(model, TRANSFORMER, model)):
        refuse_merging_backend(configs[0].where, od_config, model)
    if _holds_every_component(model):
        for config in configs:
            _check_reached(config)
            _check_entries(config)
    attention.check(od_config, model)
    _record_unasked(model)
    intake.take_in(loader, model)
    for layer in _quantized(model):
        layer.quant_method.watch_bias(layer)
        layer.quant_method.may_pin = bool(od_config.pin_cpu_memory)


def after_load(configs: Sequence[AskedConfig], loader: Any, model: Module) -> None:
    """Refuse a layer that is not complete, let HSDP shard the DiT's; log and write what was loaded."""
    od_config = loader.od_config
    checkpoints = intake.finish()
    _host(od_config, model)
    for layer in _quantized(model):
        layer.quant_method.process_weights_after_loading(layer)
    if od_config.parallel_config.use_hsdp:
        for layer in _quantized(getattr(model, TRANSFORMER, model)):
            layer.quant_method.store_for_sharding(layer)
    if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
        return
    names = sorted({config.get_name() for config in configs}) if _holds_ours(od_config) else []
    loaded = survey(model, "+".join(names) or None, checkpoints)
    for line in report.lines(loaded):
        logger.info("%s", line)
    report.write_if_asked(loaded)


def _host(od_config: Any, model: Module) -> None:
    """Take the linears that stay in host memory out of the model, and serve their outputs."""
    hosted = _hosted(model)
    if not hosted:
        return
    device = Device(compute_device(), compute_platform())
    pinned = device.torch.type == "cuda" and bool(od_config.pin_cpu_memory)
    for layer in hosted:
        layer.quant_method.hold(layer, device.torch, pinned=pinned)
    host_projections(model, lambda linear: isinstance(linear.quant_method, HostedLinearMethod), device)


def _holds_ours(od_config: Any) -> bool:
    """Whether an engine was given a configuration of this package, for one component or for all."""
    held = od_config.quantization_config
    by_component = getattr(held, "component_configs", {})
    default = getattr(held, "default_config", None)
    return any(isinstance(config, AskedConfig) for config in (held, *by_component.values(), default))


def _record_unasked(model: Module) -> None:
    """Put down about each linear of a component with a configuration of ours what becomes of it."""
    for component in model.children():
        linears = [module for module in component.modules() if isinstance(module, LinearBase)]
        if any(decision_of(layer) is not None for layer in linears):
            for layer in linears:
                if decision_of(layer) is None:
                    record(layer, decide_unasked(layer.prefix))


def _quantized(model: Module) -> list[Any]:
    return [m for m in model.modules() if isinstance(getattr(m, "quant_method", None), H3LinearMethod)]


def _hosted(model: Module) -> list[Any]:
    return [m for m in model.modules() if isinstance(getattr(m, "quant_method", None), HostedLinearMethod)]


def _holds_every_component(model: Module) -> bool:
    # Ranks outside the text encoder's group hold a stub of it, so entries for it match nothing there.
    encoder = getattr(model, TEXT_ENCODER, None)
    return encoder is None or any(isinstance(module, LinearBase) for module in encoder.modules())


def _check_reached(config: AskedConfig) -> None:
    if not config.seen:
        raise H3QuantError(f"{config.where}: {config.get_name()} reached no linear of this model")


def _check_entries(config: AskedConfig) -> None:
    for entry in config.ignored_layers:
        if entry not in config.matched:
            raise H3QuantError(f"{config.where}: {without_match(entry, config.seen)}")
