"""Seeded random tensors and sharded safetensors files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file


class RandomTensors:
    """Draws tensors from one seeded CPU generator, so that the same calls give the same bytes."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, std: float | None = None, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """N(0, std^2) of the given shape; ``std`` defaults to ``shape[-1] ** -0.5`` (unit gain of a linear)."""
        scale = shape[-1] ** -0.5 if std is None else std
        return (torch.randn(*shape, generator=self._generator) * scale).to(dtype)

    def uniform(self, low: float, high: float, *shape: int) -> torch.Tensor:
        """U(low, high) of the given shape, fp32."""
        return torch.rand(*shape, generator=self._generator) * (high - low) + low


def save_sharded(tensors: Mapping[str, torch.Tensor], folder: Path, stem: str, shards: int) -> None:
    """Write ``tensors`` as ``shards`` safetensors files of about equal bytes, with an index if more than one.

    Names are sorted over all files. Within a file safetensors orders by dtype size and name anyway; sorting
    over files keeps a ``bias`` before its ``weight`` even where a file ends between them.

    Raises:
        ValueError: more shards than tensors.
    """
    if shards > len(tensors):
        raise ValueError(f"cannot split {len(tensors)} tensors into {shards} shards; at most {len(tensors)}")
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(tensors)
    if shards == 1:
        _save(tensors, names, folder / f"{stem}.safetensors")
        return
    total = sum(tensors[name].nbytes for name in names)
    weight_map: dict[str, str] = {}
    for index, part in enumerate(_split(tensors, names, shards, total), start=1):
        file = f"{stem}-{index:05d}-of-{shards:05d}.safetensors"
        _save(tensors, part, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    index_json = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index_json, indent=1))


def _split(tensors: Mapping[str, torch.Tensor], names: list[str], shards: int, total: int) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    written = 0
    for position, name in enumerate(names):
        files_left = shards - len(parts)
        full = written >= total * len(parts) / shards
        if parts[-1] and files_left and (full or len(names) - position == files_left):
            parts.append([])
        parts[-1].append(name)
        written += tensors[name].nbytes
    return parts


def _save(tensors: Mapping[str, torch.Tensor], names: list[str], path: Path) -> None:
    save_file({name: tensors[name].contiguous() for name in names}, path, metadata={"format": "pt"})
