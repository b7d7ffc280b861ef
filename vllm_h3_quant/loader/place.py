"""Where a model is: whether a path is one that the engine takes, and if not, the nearest that is.

The engine takes a model's root or, by its name, a partition in it. What it says of another path names neither.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from vllm_h3_quant.config.components import TEXT_ENCODER, TRANSFORMER
from vllm_h3_quant.errors import nearest

PARTITIONS = ("FL2VA", "Ref2VA")

MODEL_INDEX = "model_index.json"
CONFIG = f"{TRANSFORMER}/config.json"
"""What the engine reads at a model's root before anything else."""

PARTIAL = ".partial"
"""Ends the name of a folder in which an export grows."""

_MODULAR = ("modular_model_index.json", "fastvideo_inference.json")
"""Files that tell a release without partitions."""
_EITHER = " or ".join(f"{name}/" for name in PARTITIONS)
_HOLDS = f"{MODEL_INDEX}, {CONFIG} and {_EITHER}"
_TASKS = {"FL2VA": ("t2va", "fl2va"), "Ref2VA": ("ref2va",)}
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.ASCII)
_ABOVE = 4
_BELOW = 2
_ENTRIES = 256
"""How far around a wrong path a model is looked for."""


def wrong_place(path: Path, *, task: str | None = None) -> str | None:
    """Why the engine would not find a model at ``path``, with what to give instead; None if it would.

    Reads names of files alone.

    Args:
        path: as it was given.
        task: the engine's ``task_type``, which chooses a partition; None where none is chosen.
    """
    if not path.exists():
        return _missing(path)
    if path.is_file():
        inside = model_above(path)
        told = f"the model's folder, {inside}" if inside else f"the root of a MiniMax-H3 model, which holds {_HOLDS}"
        return f"{path} is a file; give {told}"
    if is_modular(path):
        return None
    if _is_partition(path):
        return _lacks_task(path.parent, task, path.name)
    return _misplaced(path) if _lacking(path) else _lacks_task(path, task, PARTITIONS[0])


def wrong_name(given: str, *, offline: bool, cached: Callable[[str], bool], task: str | None = None) -> str | None:
    """The same for what may be a name of the Hugging Face hub or the address of a store, too.

    Args:
        given: what the user wrote.
        offline: whether the hub may not be asked.
        cached: whether the hub's cache holds a name.
        task: the engine's ``task_type``.
    """
    path = Path(given)
    if path.exists() or path.is_symlink():
        return wrong_place(path, task=task)
    if "://" in given:
        return None
    if not _HUB_NAME.fullmatch(given):
        return wrong_place(path, task=task)
    if not offline or cached(given):
        return None
    return (
        f"{given} is no folder here, not in the Hugging Face cache, and HF_HUB_OFFLINE forbids to ask the hub; give the"
        f" root of a MiniMax-H3 model on this machine, which holds {_HOLDS}"
    )


def is_modular(path: Path) -> bool:
    """Whether a folder is a modular release, which has no partitions."""
    return any((path / name).is_file() for name in _MODULAR)


def model_above(path: Path) -> Path | None:
    """The model that a path lies in, its root where there is one, or None."""
    found = None
    for place in list(Path(os.path.abspath(path)).parents)[:_ABOVE]:
        if _is_root(place):
            return place
        if _is_partition(place):
            found = found or place
    return found


def models_below(path: Path) -> list[Path]:
    """The models at most two folders below a path, the nearest ones alone."""
    level = [Path(os.path.abspath(path))]
    for _ in range(_BELOW):
        level = [child for place in level for child in _folders(place)]
        found = [place for place in level if _is_root(place)]
        if found:
            return found
    return []


def nearest_model(path: Path) -> str:
    """``; give ...`` with the nearest models around an existing path; empty where there is none."""
    above = model_above(path)
    found = [above] if above else models_below(path)
    return f"; give {' or '.join(map(str, found))}" if found else ""


def _missing(path: Path) -> str:
    if path.is_symlink():
        return f"{path} is a link to {path.readlink()}, which does not exist"
    home = Path(os.path.expanduser(path))
    if home != path and home.exists():
        return f"{path} does not exist; did you mean {home}?"
    first, *parts = Path(os.path.abspath(path)).parts
    place = Path(first)
    for part in parts:
        close = part if (place / part).exists() else nearest(part, [entry.name for entry in _entries(place)])
        if close is None:
            return f"{path} does not exist; {place} is there"
        place = place / close
    return f"{path} does not exist; did you mean {place}?"


def _misplaced(path: Path) -> str:
    if path.name.endswith(PARTIAL):
        return f"{path} is an export that is not complete; run the same export again"
    above = model_above(path)
    if above:
        return f"{path} is a part of the model {above}; give {above}"
    lacking = _lacking(path)
    if lacking == [_EITHER] and (path / TEXT_ENCODER).is_dir():
        return f"{path} looks like a partition, whose folder must be named {' or '.join(PARTITIONS)}; rename it"
    if len(lacking) == 1:
        return f"{path} holds no {lacking[0]}; a MiniMax-H3 model's root holds {_HOLDS}"
    below = models_below(path)
    if len(below) == 1:
        return f"{path} holds the model {below[0]}; give {below[0]}"
    if below:
        return f"{path} holds the models {', '.join(map(str, below))}; give one of them"
    return f"{path} holds no MiniMax-H3 model; its root holds {_HOLDS}"


def _lacks_task(root: Path, task: str | None, alone: str) -> str | None:
    """Why a task cannot be served from a root; ``alone`` is the partition of ``auto``."""
    if task is None:
        return None
    task = task.lower()
    needed = PARTITIONS if task == "combined" else [name for name in PARTITIONS if task in _TASKS[name]] or [alone]
    for name in needed:
        if not (root / name).is_dir():
            there = "; ".join(f"{name}/ ({', '.join(_TASKS[name])})" for name in PARTITIONS if (root / name).is_dir())
            return f"{root} holds no {name}/, which --task-type {task} needs; it holds {there}"
        if not (root / name / TRANSFORMER).is_dir():
            return f"{root} holds no {name}/{TRANSFORMER}/, which --task-type {task} needs"
    return None


def _is_root(path: Path) -> bool:
    return is_modular(path) or not _lacking(path)


def _is_partition(path: Path) -> bool:
    return path.name in PARTITIONS and (path / MODEL_INDEX).is_file() and (path / TRANSFORMER).is_dir()


def _lacking(path: Path) -> list[str]:
    lacking = [name for name in (MODEL_INDEX, CONFIG) if not (path / name).is_file()]
    return lacking if any((path / name).is_dir() for name in PARTITIONS) else [*lacking, _EITHER]


def _folders(path: Path) -> Iterator[Path]:
    for entry in _entries(path):
        if entry.is_dir():
            yield entry


def _entries(path: Path) -> list[Path]:
    try:
        return sorted(path.iterdir())[:_ENTRIES]
    except OSError:
        return []  # not ours to read, so nothing there is the nearest
