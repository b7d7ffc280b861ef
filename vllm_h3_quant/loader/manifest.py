"""``manifest.json`` at the root of an exported model: the digest of every file, and of every tensor in its shards.

::

    {"format": "vllm-h3-quant", "version": "1",
     "files": {"FL2VA/transformer/model-00001-of-00051.safetensors": {"bytes": ..., "sha256": "..."}, ...},
     "tensors": {"FL2VA/transformer/model-00001-of-00051.safetensors": {"blocks.0.attn.qkv_proj.weight": "..."}, ...}}

Paths are relative to the manifest's folder, with ``/``; digests are SHA-256 in hexadecimal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeGuard

from vllm_h3_quant.config.schema import EXPORT_FORMAT
from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.loader.checkpoint import read_json
from vllm_h3_quant.loader.durable import durable
from vllm_h3_quant.loader.shards import Written

MANIFEST = "manifest.json"
VERSION = "1"
"""Version of exports and of their manifest."""

_DEPTH = 4
"""Folders between a shard and the manifest, and one more."""


@dataclass(frozen=True)
class Manifest:
    """What a model's folder holds, by path relative to it: ``files`` of any kind, ``tensors`` of shards."""

    files: Mapping[str, Mapping[str, Any]]
    tensors: Mapping[str, Mapping[str, str]]


def manifest_bytes(written: Mapping[str, Written]) -> bytes:
    """The manifest's content for the files ``written``, by path relative to the root."""
    names = sorted(written)
    content = {
        "format": EXPORT_FORMAT,
        "version": VERSION,
        "files": {name: {"bytes": written[name].nbytes, "sha256": written[name].sha256} for name in names},
        "tensors": {name: dict(written[name].tensors) for name in names if written[name].tensors},
    }
    return json.dumps(content, indent=1).encode()


def write_manifest(root: Path, written: Mapping[str, Written]) -> None:
    """Write the manifest of the files ``written`` into ``root``.

    Raises:
        H3QuantError: the disk is full or refuses.
    """
    with durable(root / MANIFEST) as stream:
        stream.write(manifest_bytes(written))


def read_manifest(root: Path) -> Manifest:
    """The manifest in ``root``.

    Raises:
        H3QuantError: there is none, or it is not one that this version reads.
    """
    file = root / MANIFEST
    try:
        changed = file.stat().st_mtime_ns
    except OSError as error:
        raise H3QuantError(f"{file}: cannot be read: {error.strerror}; only an exported model has one") from None
    return _read(file, changed)


def root_of(file: Path) -> Path:
    """The folder with the manifest that lists ``file``: as it was named, or where a link leads.

    Raises:
        H3QuantError: there is none above it.
    """
    for start in (file.absolute(), file.resolve()):
        for folder in list(start.parents)[:_DEPTH]:
            if (folder / MANIFEST).is_file():
                return folder
    raise H3QuantError(
        f"{file}: no {MANIFEST} lies above it to compare it with; only a model that vllm-h3-quant export wrote has one"
    )


def digests_of(folder: Path, file: Path) -> Mapping[str, str]:
    """Digests of a shard's tensors by name.

    Args:
        folder: the model's root, with the manifest.
        file: the shard.

    Raises:
        H3QuantError: the manifest cannot be read or does not list the file's tensors.
    """
    manifest = read_manifest(folder)
    for path, root in ((file.absolute(), folder.absolute()), (file.resolve(), folder.resolve())):
        if path.is_relative_to(root):
            found = manifest.tensors.get(path.relative_to(root).as_posix())
            if found is not None:
                return found
    raise H3QuantError(
        f"{file}: {folder / MANIFEST} lists no tensors of this file; copy the exported model again, or leave verify out"
    )


@lru_cache(maxsize=4)
def _read(file: Path, changed: int) -> Manifest:
    content = read_json(file)
    if content.get("format") != EXPORT_FORMAT or content.get("version") != VERSION:
        raise H3QuantError(
            f"{file}: has the format {content.get('format')!r} and version {content.get('version')!r}; this version of"
            f" vllm-h3-quant reads {EXPORT_FORMAT!r} and {VERSION!r}"
        )
    files, tensors = content.get("files"), content.get("tensors")
    if not _by_file(files) or not _by_file(tensors) or not all(_digests(found) for found in tensors.values()):
        raise H3QuantError(f"{file}: does not map files and their tensors to digests; copy it again")
    return Manifest(files, tensors)


def _by_file(value: Any) -> TypeGuard[dict[str, dict[str, Any]]]:
    return isinstance(value, dict) and all(isinstance(entry, dict) for entry in value.values())


def _digests(value: Mapping[str, Any]) -> bool:
    return all(isinstance(digest, str) and len(digest) == 64 for digest in value.values())
