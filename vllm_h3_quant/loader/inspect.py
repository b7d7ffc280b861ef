"""The components in a folder or file, and a summary of each, without a model."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from vllm_h3_quant.config.components import TEXT_ENCODER, TRANSFORMER
from vllm_h3_quant.config.schema import Method, parse
from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.kernels.formats import FP8
from vllm_h3_quant.loader.architecture import Architecture
from vllm_h3_quant.loader.checkpoint import open_checkpoint, read_json
from vllm_h3_quant.loader.decided import decided
from vllm_h3_quant.loader.formats import detect
from vllm_h3_quant.loader.place import PARTITIONS, nearest_model, wrong_place
from vllm_h3_quant.loader.plan import Plan, plan_text_encoder, plan_transformer
from vllm_h3_quant.methods.formats import FORMATS
from vllm_h3_quant.methods.scope import Storage

ENCODER_LAYERS = 50
"""Decoder layers of Qwen3-VL that vLLM-Omni 0.30 reads for MiniMax-H3."""


@dataclass(frozen=True)
class Use:
    """How a method would load a component.

    Attributes:
        method: its name.
        as_they_are: linears whose codes it uses.
        quantized: linears whose values it quantizes, decoded first where they are codes of another kind.
        kept: linears that stay values, by reason.
    """

    method: str
    as_they_are: int
    quantized: int
    kept: dict[str, int]


def find_components(path: Path) -> dict[str, Path]:
    """Components below ``path`` by their place in it: a model's root, a partition, one component, or one file.

    Raises:
        H3QuantError: there is no such path, or nothing there looks like a component.
    """
    if not path.exists():
        raise H3QuantError(str(wrong_place(path)))
    if path.is_file() or any(path.glob("*.safetensors")) or any(path.glob("*.safetensors.index.json")):
        return {path.name: path}
    found = {}
    for partition in (path, *(path / name for name in PARTITIONS)):
        for component in (TRANSFORMER, TEXT_ENCODER):
            folder = partition / component
            if any(folder.glob("*.safetensors")) or any(folder.glob("*.safetensors.index.json")):
                found[str(folder.relative_to(path))] = folder
    if not found:
        raise H3QuantError(
            f"{path}: holds no {TRANSFORMER}/ or {TEXT_ENCODER}/ with safetensors files, by itself or in"
            f" {' or '.join(PARTITIONS)}{nearest_model(path)}"
        )
    return found


def plan_component(place: Path) -> Plan:
    """The plan of a component in a folder or file, by what its tensors are called.

    The DiT's sizes are those that the engine would read: of ``ROOT/transformer/config.json`` for ``ROOT/FL2VA``.
    """
    checkpoint = open_checkpoint(place)
    if detect(checkpoint).layout.component == TEXT_ENCODER:
        return plan_text_encoder(checkpoint, ENCODER_LAYERS)
    read_by_engine = place.parent.parent / TRANSFORMER / "config.json"
    if place.parent.name in PARTITIONS and read_by_engine.is_file():
        architecture = Architecture.from_config(read_json(read_by_engine), where=str(read_by_engine))
        return plan_transformer(checkpoint, architecture)
    return plan_transformer(checkpoint)


def uses(plan: Plan) -> list[Use]:
    """How each method by itself would load a component without problems."""
    component = TEXT_ENCODER if plan.architecture is None else TRANSFORMER
    found = []
    for method in Method:
        fmt = FORMATS[method]
        decisions = decided(parse(method.value, where=method.value), component, plan)
        codes = [plan.linears[name] for name, decision in decisions.items() if decision.storage is Storage.CODES]
        kept = Counter(decision.reason for decision in decisions.values() if decision.storage is not Storage.CODES)
        ready = sum(linear.has_codes(fmt) and (fmt is FP8 or linear.rotation > 0) for linear in codes)
        found.append(Use(method.value, ready, len(codes) - ready, dict(kept)))
    return found


def dtypes(plan: Plan) -> dict[str, tuple[int, int]]:
    """Number of tensors and their bytes by dtype."""
    count = Counter(entry.dtype for entry in plan.checkpoint.entries.values())
    nbytes: Counter[str] = Counter()
    for entry in plan.checkpoint.entries.values():
        nbytes[entry.dtype] += entry.nbytes
    return {dtype: (count[dtype], nbytes[dtype]) for dtype in sorted(count)}


def codings(plan: Plan) -> dict[str, int]:
    """Number of linears by how their numbers are coded; one of several codings counts under all of them together."""
    return dict(Counter(linear.coding for linear in plan.linears.values()))
