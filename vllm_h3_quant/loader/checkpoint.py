"""The files of one component: every tensor's entry, from headers and index alone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.loader.header import Entry, Header, read_header


@dataclass(frozen=True)
class Checkpoint:
    """One component's tensors.

    Attributes:
        place: the folder or file it was read from, for errors.
        entries: by name, in the order of files and bytes.
        metadata: of all files; a key that differs between them keeps its first value.
        config: ``config.json`` beside the files, empty where there is none.
        duplicates: names that more than one file holds.
    """

    place: Path
    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]
    config: Mapping[str, Any]
    duplicates: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(dict.fromkeys(entry.file for entry in self.entries.values()))

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries.values())


def open_checkpoint(place: Path) -> Checkpoint:
    """The checkpoint in a folder, or in a single file.

    A folder's index decides which files belong to it, as it does for the engine; without one all do.

    Raises:
        H3QuantError: no safetensors file, a file of the index or a tensor of it that is missing, or a bad header.
    """
    if place.is_file():
        return read_files(place, [place])
    if not place.is_dir():
        raise H3QuantError(f"{place} is neither a folder nor a file")
    indexes = sorted(place.glob("*.safetensors.index.json"))
    if len(indexes) > 1:
        raise H3QuantError(f"{place} holds {len(indexes)} indexes ({', '.join(i.name for i in indexes)}); keep one")
    if not indexes:
        files = sorted(place.glob("*.safetensors"))
        if not files:
            raise H3QuantError(f"{place} holds no safetensors file")
        return read_files(place, files)
    weight_map = _read_index(indexes[0])
    files = [place / name for name in sorted(set(weight_map.values()))]
    for file in files:
        if not file.is_file():
            lacking = sorted(name for name, value in weight_map.items() if value == file.name)
            raise H3QuantError(
                f"{file} is missing: {indexes[0].name} places {len(lacking)} tensors in it, {lacking[0]!r} first;"
                " copy the file"
            )
    found = read_files(place, files)
    for name, file_name in weight_map.items():
        entry = found.entries.get(name)
        if entry is None or (entry.file.name != file_name and name not in found.duplicates):
            where = "it is in no file" if entry is None else f"it is in {entry.file.name}"
            raise H3QuantError(f"{indexes[0]}: places tensor {name!r} in {file_name}, but {where}")
    return found


def read_files(place: Path, files: Iterable[Path]) -> Checkpoint:
    """The checkpoint made of ``files``, whatever an index says.

    Raises:
        H3QuantError: a bad header, or a ``config.json`` that is no mapping.
    """
    headers = [read_header(file) for file in files]
    config = (place if place.is_dir() else place.parent) / "config.json"
    return _merge(place, headers, read_json(config) if config.is_file() else {})


def read_json(file: Path) -> dict[str, Any]:
    """A JSON file that holds a mapping.

    Raises:
        H3QuantError: it cannot be read or holds something else.
    """
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise H3QuantError(f"{file}: is no JSON that can be read: {error}") from None
    if not isinstance(content, dict):
        raise H3QuantError(f"{file}: holds {type(content).__name__}, not a mapping")
    return content


def _merge(place: Path, headers: list[Header], config: Mapping[str, Any]) -> Checkpoint:
    entries: dict[str, Entry] = {}
    metadata: dict[str, str] = {}
    duplicates = []
    for header in headers:
        for name, entry in header.entries.items():
            if name in entries:
                duplicates.append(name)
            else:
                entries[name] = entry
        metadata = {**header.metadata, **metadata}
    return Checkpoint(place, entries, metadata, config, tuple(duplicates))


def _read_index(file: Path) -> dict[str, str]:
    weight_map = read_json(file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise H3QuantError(f"{file}: has no weight_map")
    for name, value in weight_map.items():
        if not isinstance(value, str) or not _is_file_name(value):
            raise H3QuantError(f"{file}: places tensor {name!r} in {value!r}, which is no file name")
    return weight_map


def _is_file_name(text: str) -> bool:
    """Whether ``text`` names a file of this folder: no path, nothing unprintable, at most 255 bytes."""
    return bool(text) and Path(text).name == text and text.isprintable() and len(text.encode()) <= 255
