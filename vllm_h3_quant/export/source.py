"""The model that is exported: its partitions, its components and every other file of it."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from vllm_h3_quant.config.components import COMPONENTS, TEXT_ENCODER
from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.loader.architecture import Architecture
from vllm_h3_quant.loader.checkpoint import open_checkpoint, read_json
from vllm_h3_quant.loader.place import CONFIG, MODEL_INDEX, PARTITIONS, is_modular, wrong_place
from vllm_h3_quant.loader.plan import Plan, plan_text_encoder, plan_transformer

_EITHER = " or ".join(f"{name}/" for name in PARTITIONS)
_WEIGHTS = (".safetensors", ".safetensors.index.json")


@dataclass(frozen=True)
class Source:
    """A model on the disk.

    Attributes:
        root: the folder that holds the partitions.
        partitions: those that are exported.
    """

    root: Path
    partitions: tuple[str, ...]

    def components(self) -> Iterator[tuple[str, str]]:
        """Component and folder, relative to the root, of everything that can be quantized."""
        for partition in self.partitions:
            for component in COMPONENTS:
                folder = self.root / partition / component
                if folder.is_dir() and any(name.name.endswith(_WEIGHTS) for name in folder.iterdir()):
                    yield component, f"{partition}/{component}"

    def plan(self, component: str, folder: str, encoder_layers: int) -> Plan:
        """The plan of a component, which can be exported.

        Args:
            component: its name.
            folder: where it is, relative to the root.
            encoder_layers: how many decoder layers of the text encoder the engine reads.

        Raises:
            H3QuantError: it cannot be loaded, is an export already, or is pruned.
        """
        checkpoint = open_checkpoint(self.root / folder)
        if component == TEXT_ENCODER:
            plan = plan_text_encoder(checkpoint, encoder_layers)
        else:
            config = self.root / CONFIG
            plan = plan_transformer(checkpoint, Architecture.from_config(read_json(config), where=str(config)))
        if plan.detection.format.is_export:
            raise H3QuantError(
                f"{checkpoint.place}: is an export of vllm-h3-quant already; export the model that it was made from"
            )
        plan.check()
        if plan.detection.curve:
            raise H3QuantError(
                f"{checkpoint.place}: is {plan.detection.name}, which is served as it is; export a checkpoint with all"
                " AdaLN weights"
            )
        return plan

    def other_files(self, exported: Collection[str]) -> Iterator[str]:
        """Files to copy, relative to the root: all but hidden ones, partitions left out, and exported weights.

        Args:
            exported: folders of components that are written anew.
        """
        left_out = {name for name in PARTITIONS if name not in self.partitions}
        for folder, subfolders, files in os.walk(self.root, followlinks=True):
            place = Path(folder).relative_to(self.root)
            skipped = left_out if place == Path() else frozenset()
            subfolders[:] = sorted(name for name in subfolders if not name.startswith(".") and name not in skipped)
            for name in sorted(files):
                weights = place.as_posix() in exported and name.endswith(_WEIGHTS)
                if not name.startswith(".") and not weights:
                    yield (place / name).as_posix()


def open_source(model: Path) -> Source:
    """The model at ``model``: a root, or one of its partitions, which is then exported alone.

    Raises:
        H3QuantError: it is neither.
    """
    wrong = wrong_place(model)
    if wrong:
        raise H3QuantError(wrong)
    if is_modular(model):
        raise H3QuantError(f"{model} is a modular release without partitions; export a model with {_EITHER}")
    root, partitions = (model.parent, (model.name,)) if model.name in PARTITIONS else (model, PARTITIONS)
    lacking = [name for name in (MODEL_INDEX, CONFIG) if not (root / name).is_file()]
    if lacking:
        raise H3QuantError(
            f"{root} holds no {lacking[0]}, which an export of {model.name} needs too; complete the root"
        )
    return Source(root, tuple(name for name in partitions if (root / name).is_dir()))
