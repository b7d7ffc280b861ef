"""Tensors of a checkpoint on the host, mapped from their files."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.loader.header import Entry


def mapped(entry: Entry) -> torch.Tensor:
    """The tensor, without a copy: its bytes are read when they are touched, and ranks of a host share them.

    Raises:
        H3QuantError: the file cannot be opened, or what arrives is not what the header states: a reader that casts
            codes to values on the way would leave their scale to be applied to nothing.
    """
    try:
        stat = entry.file.stat()
        tensor = _open(entry.file, stat.st_mtime_ns, stat.st_size).get_tensor(entry.name)
    except (OSError, SafetensorError) as error:
        raise H3QuantError(f"{entry.file}: tensor {entry.name!r} cannot be read: {error}") from None
    if tensor.dtype != entry.torch_dtype or tuple(tensor.shape) != entry.shape:
        raise H3QuantError(
            f"{entry.file}: tensor {entry.name!r} arrives as {_told(tensor.dtype, tensor.shape)}, but its header states"
            f" {_told(entry.torch_dtype, entry.shape)}; load the file without the streamer that converts it"
        )
    return tensor


@lru_cache(maxsize=64)
def _open(file: Path, changed: int, size: int) -> Any:
    # A file that was written again is opened again.
    return safe_open(str(file), framework="pt", device="cpu")


def close_files() -> None:
    """Forget open files. Tensors that were mapped stay valid."""
    _open.cache_clear()


def _told(dtype: torch.dtype, shape: Any) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def digest(entry: Entry) -> str:
    """SHA-256 of a tensor's bytes in its file, in hexadecimal."""
    found = hashlib.sha256()
    with entry.file.open("rb") as stream:
        stream.seek(entry.start)
        left = entry.nbytes
        while left:
            chunk = stream.read(min(left, 1 << 22))
            if not chunk:
                raise H3QuantError(f"{entry.file}: truncated in tensor {entry.name!r}; copy the file again")
            found.update(chunk)
            left -= len(chunk)
    return found.hexdigest()


def verify(entry: Entry, digests: Mapping[str, str]) -> None:
    """Compare a tensor's bytes with the digest that the manifest holds for it.

    Raises:
        H3QuantError: they differ, or the manifest has no digest.
    """
    wanted = digests.get(entry.name)
    if wanted is None:
        raise H3QuantError(f"{entry.file}: tensor {entry.name!r} is not in the manifest")
    if digest(entry) != wanted:
        raise H3QuantError(
            f"{entry.file}: the bytes of tensor {entry.name!r} are not those of the manifest; copy the file again"
        )
