"""Files of a model, looked at and changed without this package's reader."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from vllm_h3_quant.tiny_h3 import TinyH3

SPEC = TinyH3(layers=2, refiner_layers=1, encoder_layers=2)

State = dict[str, torch.Tensor]


def files_of(folder: Path) -> dict[str, str]:
    """SHA-256 of every file in a folder."""
    return {
        file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in folder.rglob("*")
        if file.is_file()
    }


def tensors_of(folder: Path) -> State:
    """Every tensor of a component, by the safetensors library."""
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def change(folder: Path, edit: Callable[[State], None]) -> None:
    """Apply ``edit`` to each file's tensors; new ones are in no index, which is removed."""
    for file in sorted(folder.glob("*.safetensors")):
        tensors = {name: value.clone() for name, value in load_file(file).items()}
        edit(tensors)
        file.unlink()
        save_file(tensors, file, metadata={"format": "pt"})
    for index in folder.glob("*.index.json"):
        index.unlink()
