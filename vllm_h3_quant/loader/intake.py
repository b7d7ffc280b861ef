"""The checkpoints of one load: planned and checked before a weight is read, then handed to the engine.

A component is taken in hand when it has a linear with a method of this package.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import Module

from vllm_h3_quant.config.schema import H3QuantOptions
from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.loader.architecture import Architecture
from vllm_h3_quant.loader.checkpoint import open_checkpoint
from vllm_h3_quant.loader.curve import curve_shape, refuse_unverified
from vllm_h3_quant.loader.decided import STORED_AS_VALUES, with_checkpoint
from vllm_h3_quant.loader.formats import engine_layout
from vllm_h3_quant.loader.header import Entry
from vllm_h3_quant.loader.manifest import digests_of, root_of
from vllm_h3_quant.loader.plan import Plan, plan_text_encoder, plan_transformer
from vllm_h3_quant.loader.progress import Progress
from vllm_h3_quant.loader.reader import close_files, verify
from vllm_h3_quant.loader.staging import release
from vllm_h3_quant.loader.stream import encoder_stream, transformer_stream
from vllm_h3_quant.log import get_logger
from vllm_h3_quant.methods.base import H3LinearMethod
from vllm_h3_quant.methods.record import decision_of, record
from vllm_h3_quant.methods.scope import TEXT_ENCODER, Storage
from vllm_h3_quant.upstream import weight_source
from vllm_h3_quant.upstream.curve import serve_curve

logger = get_logger(__name__)

FIXED_BY_EXPORT = ("method", "ignored_layers", "adaln", "rotation")
"""Keys that say what an exported checkpoint's codes are, and so cannot be chosen any more when it is loaded. Values of
AdaLN are the same for ``keep`` and ``host``, which may stand for each other."""


class Component:
    """One component whose linears this package fills.

    Attributes:
        plan: its checkpoint.
        taken: linears by name that read their weights from it.
        as_they_are: how many of those use its codes without decoding them.
        kept: linears that a quantized checkpoint holds as values, and that stay so.
    """

    def __init__(self, name: str, module: Module, plan: Plan) -> None:
        self.name = name
        self.module = module
        self.plan = plan
        self.taken: dict[str, Any] = {
            name: layer
            for name, layer in module.named_modules()
            if isinstance(getattr(layer, "quant_method", None), H3LinearMethod)
        }
        self.options: H3QuantOptions = next(iter(self.taken.values())).quant_method.options
        self.as_they_are = 0
        self.kept = 0

    def prepare(self) -> None:
        """Check the checkpoint and tell each linear where its weight is.

        Raises:
            H3QuantError: it cannot be loaded as it was asked for.
        """
        self.plan.check()
        self._check_export()
        self._prepare_curve()
        for name in self.taken:
            if name not in self.plan.linears:
                raise H3QuantError(f"{self.plan.checkpoint.place}: lacks the weight of {name!r}; copy all its files")
        self._withdraw()
        for name, layer in self.taken.items():
            source = self.plan.linears[name]
            self.as_they_are += layer.quant_method.take_from(layer, source)

    def stream(self, loader: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """The component's tensors for the engine."""
        progress = Progress(self.plan, f"Loading {self.name}", shown=weight_source.shows_progress(loader))
        try:
            if self.plan.architecture is None:
                yield from encoder_stream(self.plan, self.taken, arrive=self._arrive, done=progress.done)
            else:
                yield from transformer_stream(
                    self.plan,
                    self.taken,
                    wanted=engine_layout(own_names=weight_source.expects_diffusers_names(self.module)),
                    arrive=self._arrive,
                    done=progress.done,
                )
        finally:
            progress.close()

    def describe(self) -> str:
        """One line about what is loaded how."""
        plan = self.plan
        found = f"{self.name}: {plan.detection.name}, {plan.checkpoint.nbytes / 2**30:.2f} GiB"
        if not plan.detection.quantized:
            return f"{found}, {len(self.taken)} linears to quantize"
        decoded = len(self.taken) - self.as_they_are
        return (
            f"{found}: codes of {self.as_they_are} linears are used as they are, {decoded} are decoded and quantized"
            f" again, {self.kept} linears are values and stay so"
        )

    def _withdraw(self) -> None:
        """Leave linears to the engine that the checkpoint keeps from codes, and put down why."""
        asked = {name: decision for name, layer in self.taken.items() if (decision := decision_of(layer))}
        for name, decision in with_checkpoint(asked, self.plan).items():
            if decision.storage is not Storage.CODES:
                layer = self.taken.pop(name)
                layer.quant_method.withdraw(layer)
                record(layer, decision)
                self.kept += decision.reason == STORED_AS_VALUES

    def _check_export(self) -> None:
        plan = self.plan
        if not plan.detection.format.is_export:
            if self.options.checkpoint:
                raise H3QuantError(
                    f"{plan.checkpoint.place}: config.json says that this is an export of this package, but it is a"
                    f" {plan.detection.name} checkpoint; remove its quantization_config"
                )
            return
        try:
            stated = H3QuantOptions(**json.loads(plan.checkpoint.metadata["options"]))
        except (KeyError, TypeError, ValueError) as error:
            raise H3QuantError(
                f"{plan.checkpoint.place}: its files do not state the options of the export ({error!r}); export the"
                " model again"
            ) from None
        for key in FIXED_BY_EXPORT:
            ours, theirs = getattr(self.options, key), getattr(stated, key)
            if ours != theirs and not (key == "adaln" and "quantize" not in (ours, theirs)):
                raise H3QuantError(
                    f"{plan.checkpoint.place}: was exported with {key}={_told(theirs)!r}, not {_told(ours)!r}; leave"
                    " the key out, or export the model again"
                )

    def _prepare_curve(self) -> None:
        if not self.plan.detection.curve:
            return
        refuse_unverified(self.plan, self.options.allow_unverified_curve)
        serve_curve(self.module, *curve_shape(self.plan))

    def _arrive(self, entry: Entry) -> None:
        if self.options.verify:
            verify(entry, digests_of(root_of(entry.file), entry.file))


_components: dict[str, Component] = {}


def take_in(loader: Any, model: Module) -> None:
    """Plan and check the checkpoint of every component with a linear of ours, before any weight is read.

    Raises:
        H3QuantError: one of them cannot be loaded as it was asked for.
    """
    _components.clear()
    for name, source in weight_source.sources(model).items():
        module = getattr(model, name, None)
        if module is None or not any(
            isinstance(getattr(layer, "quant_method", None), H3LinearMethod) for layer in module.modules()
        ):
            continue
        checkpoint = open_checkpoint(weight_source.folder_of(loader, source))
        if name == TEXT_ENCODER:
            plan = plan_text_encoder(checkpoint, weight_source.encoder_layers())
        else:
            config = loader.od_config.tf_model_config.to_dict()
            plan = plan_transformer(checkpoint, Architecture.from_config(config, where="transformer/config.json"))
        component = Component(name, module, plan)
        if weight_source.fuses_adapter(model) and name != TEXT_ENCODER:
            _refuse_codes_with_adapter(plan)
            continue
        component.prepare()
        _components[name] = component
        logger.info("%s", component.describe())
        for note in plan.notes:
            logger.warning("%s", note)


def claim(loader: Any, name: str) -> Iterator[tuple[str, torch.Tensor]] | None:
    """The stream of a component that was taken in; None for every other."""
    component = _components.get(name)
    return component.stream(loader) if component else None


def finish() -> dict[str, str]:
    """Forget the load's checkpoints, and tell for each component what it was."""
    found = {name: component.describe() for name, component in _components.items()}
    _components.clear()
    close_files()
    release()
    return found


def _refuse_codes_with_adapter(plan: Plan) -> None:
    plan.check()
    if plan.detection.quantized:
        raise H3QuantError(
            f"{plan.checkpoint.place}: an adapter is merged into the weights as they are read, but this is a"
            f" {plan.detection.name} checkpoint; merge it into a bf16 checkpoint"
        )


def _told(value: object) -> object:
    return getattr(value, "value", value)
