"""Writes a safetensors file from front to back, with no more of it in memory than the piece at hand.

The header comes first in a file, so names, dtypes and shapes are known before the first byte is written. It is padded
with spaces until the data begins at a page, and the tensors named ``first`` follow it in the order in which each stays
aligned: where the file is mapped, codes lie as a kernel wants them and need no copy.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from vllm_h3_quant.loader.durable import durable
from vllm_h3_quant.loader.header import DTYPES

PAGE = 4096
"""The data of a file begins at a multiple of this."""
ALIGNMENT = 128
"""Tensors named first begin at a multiple of this, if their own bytes are one."""

_STEP = 2**24
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to be written.

    Attributes:
        name: in the file.
        dtype: its dtype, one of :data:`~vllm_h3_quant.loader.header.DTYPES`.
        shape: its shape.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Written:
    """A finished file.

    Attributes:
        nbytes: its size.
        sha256: of all of it, in hexadecimal.
        tensors: of each tensor's bytes, by name; empty for a file without tensors.
    """

    nbytes: int
    sha256: str
    tensors: Mapping[str, str]


def in_order(specs: Iterable[TensorSpec], first: Collection[str]) -> tuple[TensorSpec, ...]:
    """``specs`` in the order of a file: each begins at a multiple of its dtype, those of ``first`` of more.

    A tensor of ``first`` with bytes that are no multiple of :data:`ALIGNMENT` would push those behind it off theirs,
    so it goes to the others, which follow by falling size of their dtype.
    """

    def place(spec: TensorSpec) -> tuple[bool, int]:
        aligned = spec.name in first and spec.nbytes % ALIGNMENT == 0
        return not aligned, 0 if aligned else -spec.dtype.itemsize

    return tuple(sorted(specs, key=place))


def header_bytes(specs: Iterable[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """The length and the JSON of a file's header, padded to a multiple of :data:`PAGE`."""
    content: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for spec in specs:
        begin, end = end, end + spec.nbytes
        content[spec.name] = {"dtype": _NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [begin, end]}
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % PAGE)
    return struct.pack("<Q", len(text)) + text


@contextmanager
def shard_writer(file: Path, specs: Iterable[TensorSpec], metadata: Mapping[str, str]) -> Iterator[ShardWriter]:
    """A writer of ``file``, which appears when the block ends without an error.

    Args:
        file: where it will be.
        specs: its tensors, in the order in which they will be written (:func:`in_order`).
        metadata: of the file.

    Raises:
        H3QuantError: the disk is full or refuses.
        ValueError: a tensor was not written.
    """
    with durable(file) as stream, ThreadPoolExecutor(2, thread_name_prefix="h3-quant-digest") as pool:
        writer = ShardWriter(stream, pool, tuple(specs), metadata)
        yield writer
        writer.check_complete()


class ShardWriter:
    """One file on its way to the disk (:func:`shard_writer`)."""

    def __init__(
        self, stream: BinaryIO, pool: ThreadPoolExecutor, specs: tuple[TensorSpec, ...], metadata: Mapping[str, str]
    ) -> None:
        self.specs = specs
        self._stream = stream
        self._pool = pool
        self._all = hashlib.sha256()
        self._tensors: dict[str, str] = {}
        self._nbytes = 0
        self._put(header_bytes(specs, metadata), hashlib.sha256())

    def write(self, name: str, pieces: Iterable[torch.Tensor]) -> None:
        """Write the next tensor.

        Args:
            name: of the tensor whose turn it is.
            pieces: its bytes in order: tensors of its dtype on the host, together of its size.

        Raises:
            ValueError: another tensor's turn, a piece of another dtype, or pieces of another size.
        """
        due = self.specs[len(self._tensors) :][:1]
        if not due or due[0].name != name:
            raise ValueError(f"{name!r} is written where {due[0].name if due else 'nothing'!r} is due")
        spec, digest, left = due[0], hashlib.sha256(), due[0].nbytes
        for piece in pieces:
            if piece.dtype is not spec.dtype or piece.nbytes > left:
                raise ValueError(
                    f"{name!r} takes {left} more bytes of {spec.dtype}, not {piece.nbytes} of {piece.dtype}"
                )
            left -= piece.nbytes
            flat = piece.contiguous().reshape(-1).view(torch.uint8).numpy().data
            for at in range(0, len(flat), _STEP):
                self._put(flat[at : at + _STEP], digest)
        if left:
            raise ValueError(f"{name!r} lacks {left} bytes")
        self._tensors[name] = digest.hexdigest()

    def check_complete(self) -> None:
        """Refuse a file that lacks a tensor.

        Raises:
            ValueError: with its name.
        """
        if len(self._tensors) < len(self.specs):
            raise ValueError(f"{self.specs[len(self._tensors)].name!r} was never written")

    def written(self) -> Written:
        """What was written so far."""
        return Written(self._nbytes, self._all.hexdigest(), dict(self._tensors))

    def _put(self, data: bytes | memoryview, digest: Any) -> None:
        # Digests take longer than the write, and all three leave the interpreter's lock.
        summed = [self._pool.submit(into.update, data) for into in (self._all, digest)]
        self._stream.write(data)
        self._nbytes += len(data)
        for future in summed:
            future.result()
