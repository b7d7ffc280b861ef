"""What an export consists of, file by file, known before any weight is read."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from vllm_h3_quant import __version__
from vllm_h3_quant.config.components import TRANSFORMER
from vllm_h3_quant.config.schema import EXPORT_FORMAT, H3QuantOptions
from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.export.config import Request
from vllm_h3_quant.export.source import Source
from vllm_h3_quant.kernels.formats import CodeFormat
from vllm_h3_quant.loader.checkpoint import read_json
from vllm_h3_quant.loader.decided import decided
from vllm_h3_quant.loader.formats.base import Layout
from vllm_h3_quant.loader.formats.beside import SCALE, WEIGHT
from vllm_h3_quant.loader.formats.export import statement, written_layout
from vllm_h3_quant.loader.header import Entry
from vllm_h3_quant.loader.manifest import MANIFEST, VERSION
from vllm_h3_quant.loader.place import CONFIG, MODEL_INDEX
from vllm_h3_quant.loader.plan import Plan
from vllm_h3_quant.loader.shards import TensorSpec, header_bytes, in_order
from vllm_h3_quant.loader.stored import StoredLinear
from vllm_h3_quant.methods.formats import FORMATS
from vllm_h3_quant.methods.rotation import rotation_for
from vllm_h3_quant.methods.scope import Storage, asked_name, decide

INDEX = "model.safetensors.index.json"
PROGRESS = "progress.json"


@dataclass(frozen=True)
class LinearFile:
    """A linear's weight in an exported file.

    Attributes:
        module: its name in the file.
        stored: the weight as the source has it.
        fmt: format of its codes; None where it stays values.
        rotation: group of the rotation that the codes are made after, 0 for none.
    """

    module: str
    stored: StoredLinear
    fmt: CodeFormat | None
    rotation: int = 0

    @property
    def weight(self) -> TensorSpec:
        """``(N, K)`` codes or values."""
        dtype = self.fmt.dtype if self.fmt else self.stored.value_dtype
        return TensorSpec(f"{self.module}.{WEIGHT}", dtype, self.stored.shape)

    @property
    def scale(self) -> TensorSpec:
        """``(N, 1)`` fp32 scales of codes."""
        return TensorSpec(f"{self.module}.{SCALE}", torch.float32, (self.stored.shape[0], 1))

    @property
    def ready(self) -> bool:
        """Whether the source's codes are those to write."""
        return self.fmt is not None and self.stored.has_codes(self.fmt) and self.stored.rotation == self.rotation


@dataclass(frozen=True)
class Shard:
    """A file with weights.

    Attributes:
        path: relative to the model's root.
        linears: linears by the names of their weights.
        plain: every other tensor, by its name in the file.
        layer: whether it is a block or decoder layer, rather than what lies outside of them.
        common: metadata that all shards of the component have.
    """

    path: str
    linears: Mapping[str, LinearFile]
    plain: Mapping[str, Entry]
    layer: bool
    common: Mapping[str, str]

    @cached_property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Its tensors in the order of the file."""
        specs = [TensorSpec(name, entry.torch_dtype, entry.shape) for name, entry in self.plain.items()]
        specs += [linear.weight for linear in self.linears.values()]
        specs += [linear.scale for linear in self.linears.values() if linear.fmt]
        return in_order(specs, self.linears.keys())

    @cached_property
    def metadata(self) -> dict[str, str]:
        """Of the file: that of the component, and how the codes of each linear were made."""
        made = (statement(each.module, each.fmt, each.rotation) for each in self.linears.values() if each.fmt)
        return {**self.common, **dict(made)}

    @cached_property
    def nbytes(self) -> int:
        """Size of the file."""
        return len(header_bytes(self.specs, self.metadata)) + sum(spec.nbytes for spec in self.specs)


@dataclass
class ExportPlan:
    """An export.

    Attributes:
        shards: files with weights, in the order in which they are written.
        copies: files that are copied, by path relative to the root.
        indexes: which file holds which tensor, by path.
        last: files that make a folder a model, and so are written when all others are there.
        notes: what was decided, a line a component.
    """

    shards: list[Shard] = field(default_factory=list)
    copies: dict[str, Path] = field(default_factory=dict)
    indexes: dict[str, bytes] = field(default_factory=dict)
    last: dict[str, bytes] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def plan_export(source: Source, request: Request, encoder_layers: int) -> ExportPlan:
    """Everything that will be written. Reads headers and scales, no weight.

    Args:
        source: the model.
        request: what was asked for.
        encoder_layers: how many decoder layers of the text encoder the engine reads.

    Raises:
        H3QuantError: a component that cannot be exported, an entry of ``ignored_layers`` that matches nothing, or
            nothing to quantize.
    """
    planned: dict[str, tuple[str, Plan]] = {}
    for component, folder in source.components():
        if request.options(component) is not None:
            planned[folder] = component, source.plan(component, folder, encoder_layers)
    for given in request.given:
        names = [
            name
            for component, plan in planned.values()
            if component in given.components
            for name in (asked_name(component, name) for name in plan.linears)
            if (role := decide(given.options, name).role) and role.quantized
        ]
        if not names:
            raise H3QuantError(f"{given.where}: {source.root} has no {' or '.join(given.components)} to quantize")
        given.check_entries(dict.fromkeys(names))
    export = ExportPlan()
    versions = json.dumps(package_versions())
    exported = set()
    for folder, (component, plan) in planned.items():
        options = request.options(component)
        assert options is not None
        # The engine reads a component without a quantized linear by itself, so it has to stay as it was.
        if any(decide(options, asked_name(component, name)).storage is Storage.CODES for name in plan.linears):
            exported.add(folder)
            _add_component(export, folder, component, plan, options, versions)
    if not exported:
        raise H3QuantError(f"{request.given[0].where}: ignored_layers leaves nothing to quantize")
    _add_files(export, source, request, exported)
    return export


def package_versions() -> dict[str, str]:
    """Versions of what decides an export's bytes."""
    found = {"vllm_h3_quant": __version__, "torch": torch.__version__}
    for package in ("vllm", "vllm-omni"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _add_component(
    export: ExportPlan, folder: str, component: str, plan: Plan, options: H3QuantOptions, versions: str
) -> None:
    fmt = FORMATS[options.method]
    layout = written_layout(component)
    decisions = decided(options, component, plan)
    linears: dict[int, dict[str, LinearFile]] = defaultdict(dict)
    plain: dict[int, dict[str, Entry]] = defaultdict(dict)
    for name, stored in plan.linears.items():
        module = layout.module(name)
        coded = decisions[name].storage is Storage.CODES
        rotation = rotation_for(options, stored.shape[1]) if coded else 0
        linear = LinearFile(module, stored, fmt if coded else None, rotation)
        linears[_layer(layout, module)][linear.weight.name] = linear
    for name, entry in plan.plain.items():
        if name not in layout.unread:
            plain[_layer(layout, name)][name] = entry
    layers = sorted({*linears, *plain})
    common = {
        "format": EXPORT_FORMAT,
        "version": VERSION,
        "options": json.dumps(options.model_dump(mode="json")),
        "versions": versions,
    }
    shards = [
        Shard(
            f"{folder}/model-{number:05d}-of-{len(layers):05d}.safetensors",
            linears[layer],
            plain[layer],
            layer != _OUTSIDE,
            common,
        )
        for number, layer in enumerate(layers, start=1)
    ]
    export.shards += shards
    export.indexes[f"{folder}/{INDEX}"] = _index(shards)
    every = [linear for found in linears.values() for linear in found.values()]
    ready, codes = sum(linear.ready for linear in every), sum(linear.fmt is not None for linear in every)
    kept = Counter(decision.reason for decision in decisions.values() if decision.storage is not Storage.CODES)
    export.notes.append(
        f"{folder}: {plan.detection.name}, {codes} of {len(every)} linears as {fmt.name} codes"
        + (f", {ready} of them those of the source" if ready else "")
        + (f"; as values: {', '.join(f'{count} {reason}' for reason, count in kept.items())}" if kept else "")
    )


_OUTSIDE = -1


def _layer(layout: Layout, name: str) -> int:
    """The block or decoder layer of a tensor; ``_OUTSIDE`` for none."""
    layer = layout.layer(name)
    return _OUTSIDE if layer is None else layer


def _index(shards: list[Shard]) -> bytes:
    placed = {spec.name: Path(shard.path).name for shard in shards for spec in shard.specs}
    total = sum(spec.nbytes for shard in shards for spec in shard.specs)
    return _json({"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))})


def _add_files(export: ExportPlan, source: Source, request: Request, exported: set[str]) -> None:
    """Copies, and the files in which the model says what it is."""
    # Those at the root come after those of the partitions, and the index that names the model after all.
    folders = [*(f"{partition}/" for partition in source.partitions), ""]
    last = [folder + name for folder in folders for name in (CONFIG, MODEL_INDEX)]
    for path in source.other_files(exported):
        if path not in (*last, MANIFEST, PROGRESS):
            export.copies[path] = source.root / path
    for path in last:
        file = source.root / path
        if not file.is_file():
            continue
        if path.endswith(CONFIG):
            export.last[path] = _json(_with_quantization(read_json(file), file, request, exported))
        else:
            export.last[path] = file.read_bytes()


def _with_quantization(config: Mapping[str, Any], file: Path, request: Request, exported: set[str]) -> dict[str, Any]:
    found = config.get("quantization_config")
    if found is not None and not any(folder.endswith(TRANSFORMER) for folder in exported):
        method = found.get("quant_method", found.get("method")) if isinstance(found, Mapping) else found
        raise H3QuantError(
            f"{file}: has a quantization_config ({method!r}), which that of the export would replace while the"
            f" {TRANSFORMER} stays as it is; quantize the {TRANSFORMER} too"
        )
    return {**config, "quantization_config": request.quantization_config()}


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=1) + "\n").encode()
