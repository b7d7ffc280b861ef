"""What a start of the engine is asked for, refused before the engine uses any of it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vllm_h3_quant.config import names
from vllm_h3_quant.config.components import parse_parts
from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.loader.place import model_above, models_below, wrong_name, wrong_place

_KEYS = ("quantization", "quantization_config", "diffusion_quantization_config")
"""The engine's names of a quantization, of a whole start or of one of its stages."""


def check(arguments: Mapping[str, Any]) -> None:
    """Refuse a start that asks for a method of this package; any other is not looked at.

    Args:
        arguments: of the command line or of the engine's constructor, ``model`` among them.

    Raises:
        H3QuantError: what was asked for cannot be read, or the model is not where it is said to be.
    """
    asked = list(_asked(arguments))
    for spec, where in asked:
        if isinstance(spec, str | Mapping):
            parse_parts(spec, where=where)
    if asked and isinstance(arguments.get("model"), str | os.PathLike):
        wrong = wrong_name(
            os.fspath(arguments["model"]),
            offline=_offline(),
            cached=_cached,
            task=arguments.get("task_type") or "auto",
        )
        if wrong:
            raise H3QuantError(f"model: {wrong}")


def explain(arguments: Mapping[str, Any]) -> str | None:
    """Where to look for the model that the engine did not find: an export is served without naming a method.

    None where the path is right, or where no MiniMax-H3 model is near it.
    """
    given = arguments.get("model")
    if not isinstance(given, str | os.PathLike) or not Path(given).exists():
        return None
    path = Path(given)
    wrong = wrong_place(path)
    return f"model: {wrong}" if wrong and (model_above(path) or models_below(path)) else None


def _asked(arguments: Mapping[str, Any]) -> Iterator[tuple[Any, str]]:
    """What a start and its stages ask of this package, and where."""
    yield from _specs(arguments, "")
    stages = _read(arguments.get("stage_overrides"))
    for stage, overrides in stages.items() if isinstance(stages, Mapping) else ():
        if isinstance(overrides, Mapping):
            yield from _specs(overrides, f"stage {stage}: ")


def _specs(arguments: Mapping[str, Any], stage: str) -> Iterator[tuple[Any, str]]:
    for key in _KEYS:
        spec = _read(arguments.get(key))
        method = names.method_of(spec)
        if names.looks_ours(method):
            yield spec, f"{stage}quantization {method!r}"
        elif isinstance(spec, Mapping) and names.claims_components(spec):
            yield spec, f"{stage}quantization config"
        elif _is_built(spec):
            yield spec, stage


def _read(value: Any) -> Any:
    """JSON of the command line as what it says; what is no JSON the engine refuses itself."""
    if not isinstance(value, str) or not value.lstrip().startswith("{"):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _is_built(spec: Any) -> bool:
    return type(spec).__module__.partition(".")[0] == __name__.partition(".")[0]


def _offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE) and os.environ.get("VLLM_USE_MODELSCOPE", "").lower() != "true"


def _cached(name: str) -> bool:
    from huggingface_hub import constants

    snapshots = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}" / "snapshots"
    return snapshots.is_dir() and any(snapshots.iterdir())
