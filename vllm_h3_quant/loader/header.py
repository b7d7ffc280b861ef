"""Reads the header of a safetensors file, and nothing else of it.

A file is 8 bytes of header length ``n`` (little endian), ``n`` bytes of JSON and the tensors' bytes. The JSON maps
names to ``dtype``, ``shape`` and ``data_offsets``, and ``__metadata__`` to strings. Tensors fill the rest of the
file without gaps (https://github.com/huggingface/safetensors, "Format"). Whatever differs is an error here: a file
that was cut short while it was copied must not be found out when half of a model is loaded.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch

from vllm_h3_quant.errors import H3QuantError

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
}
"""Names of dtypes in a header, for those that PyTorch has."""

FLOATS = ("F32", "F16", "BF16")
"""Those that values and scales have."""

_MAX_HEADER = 100 * 2**20
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class Entry:
    """One tensor of a file.

    Attributes:
        name: its name in the file.
        dtype: the header's name of its dtype, a key of :data:`DTYPES`.
        shape: its shape.
        file: the file.
        start: position of its first byte in the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize

    @property
    def row_nbytes(self) -> int:
        """Bytes of one index of the first dimension."""
        return math.prod(self.shape[1:]) * self.torch_dtype.itemsize


@dataclass(frozen=True)
class Header:
    """A file's tensors by name, in the order of their bytes, and its metadata."""

    file: Path
    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]


def read_header(file: Path) -> Header:
    """Parse and check the header of ``file``.

    Raises:
        H3QuantError: not a safetensors file, cut short or too long, or a tensor that its bytes do not fit.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            head = stream.read(_LENGTH.size)
            if len(head) < _LENGTH.size:
                raise H3QuantError(f"{file}: {size} bytes are no safetensors file; copy it again")
            (length,) = _LENGTH.unpack(head)
            if length > _MAX_HEADER or _LENGTH.size + length > size:
                raise H3QuantError(
                    f"{file}: a header of {length} bytes does not fit a file of {size}; it is truncated or no"
                    " safetensors file: copy it again"
                )
            text = stream.read(length)
    except OSError as error:
        raise H3QuantError(f"{file}: cannot be read: {error.strerror or error}") from error
    return _parse(file, text, size)


def _parse(file: Path, text: bytes, size: int) -> Header:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                raise H3QuantError(f"{file}: tensor {key!r} is in the header twice; write the file again")
            seen[key] = value
        return seen

    try:
        content = json.loads(text.decode(), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise H3QuantError(f"{file}: the header is no JSON ({error}); copy the file again") from None
    if not isinstance(content, dict):
        raise H3QuantError(f"{file}: the header is {type(content).__name__}, not a mapping of tensors")
    metadata = content.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise H3QuantError(f"{file}: __metadata__ must map names to strings")
    data = _LENGTH.size + len(text)
    entries = sorted((_entry(file, name, value, data) for name, value in content.items()), key=lambda found: found[1:])
    end = data
    for entry, first, last in entries:
        if first != end:
            raise H3QuantError(f"{file}: tensor {entry.name!r} begins at byte {first}, the one before ends at {end}")
        end = last
    if end > size:
        broken = next(entry for entry, _, last in entries if last > size)
        raise H3QuantError(f"{file}: truncated in tensor {broken.name!r}: {size} bytes of {end}; copy the file again")
    if end < size:
        raise H3QuantError(f"{file}: {size - end} bytes follow the last tensor; copy the file again")
    return Header(file, {entry.name: entry for entry, _, _ in entries}, metadata)


def _entry(file: Path, name: str, value: Any, data: int) -> tuple[Entry, int, int]:
    """The tensor, and where its bytes begin and end in the file by its offsets."""
    where = f"{file}: tensor {name!r}"
    if not isinstance(value, dict):
        raise H3QuantError(f"{where} is described by {type(value).__name__}, not by dtype, shape and data_offsets")
    dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise H3QuantError(f"{where} has the unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")
    if not _sizes(shape) or len(shape) > 8:
        raise H3QuantError(f"{where} has the shape {shape!r}, not a list of at most 8 sizes")
    if not _sizes(offsets) or len(offsets) != 2:
        raise H3QuantError(f"{where} has data_offsets {offsets!r}, not two positions")
    entry = Entry(name, dtype, tuple(shape), file, data + offsets[0])
    if offsets[1] - offsets[0] != entry.nbytes:
        raise H3QuantError(
            f"{where} has {offsets[1] - offsets[0]} bytes, but {dtype} of shape {list(shape)} takes {entry.nbytes}"
        )
    return entry, data + offsets[0], data + offsets[1]


def _sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 2**62 for size in value)
