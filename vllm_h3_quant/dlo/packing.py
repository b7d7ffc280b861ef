"""Weights of a block in one host buffer a dtype, each at a place where kernels may read it after the copy.

Tensors lie one after the other, each from a multiple of :data:`ALIGNMENT` bytes on. CUTLASS needs 16 to 32 bytes and
TMA 16; with 128, a cache line, a tensor is read as fast as one that was allocated by itself. Strides stay as they are:
the bytes of a transposed ``(K, N)`` view with stride ``(1, K)`` are copied in the order in which they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_h3_quant.dlo import pages, sharing
from vllm_h3_quant.dlo.sharing import Store

ALIGNMENT = 128
"""Bytes."""


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in a buffer, in elements.

    Attributes:
        offset: its first.
        room: how many until the next tensor's first.
    """

    offset: int
    room: int


def places(sizes: Sequence[int], itemsize: int) -> list[Place]:
    """Places of tensors that span ``sizes`` elements of ``itemsize`` bytes each."""
    step = max(ALIGNMENT // itemsize, 1)
    found, offset = [], 0
    for size in sizes:
        room = -(-size // step) * step
        found.append(Place(offset, room))
        offset += room
    return found


def pack(
    tensors: Sequence[torch.Tensor], *, pinned: bool, store: Store | None = None, ranks: int = 1, rank: int = 0
) -> tuple[torch.Tensor, list[Place]]:
    """A host buffer with tensors at their places and zeros between them, or one rank's share of it.

    Args:
        tensors: of one dtype, on any device.
        pinned: register the buffer with CUDA.
        store: share it with ranks that hold the same bytes; None keeps it private.
        ranks: how many hold a share each, all of one length.
        rank: which of them this is.

    Returns:
        ``(length,)`` of the tensors' dtype, and the tensors' places in the whole buffer.

    Raises:
        H3QuantError: the host has no memory left, or CUDA does not register it.
    """
    dtype = tensors[0].dtype
    spans = [_span(tensor) for tensor in tensors]
    at = places(spans, dtype.itemsize)
    length = -(-(at[-1].offset + at[-1].room) // ranks)
    first, last = rank * length, (rank + 1) * length
    # Fresh pages are zeros.
    # A GPU copies into pinned pages; the host's own threads fill fresh ones faster than CUDA would.
    early = pinned and any(tensor.is_cuda for tensor in tensors)
    nbytes = max(length, 1) * dtype.itemsize
    raw = pages.allocate(nbytes, pinned=early, shareable=store is not None and nbytes >= sharing.SMALLEST)
    buffer = raw.view(dtype)[:length]
    for tensor, place, span in zip(tensors, at, spans, strict=True):
        low, high = max(place.offset, first), min(place.offset + span, last)
        if low < high:
            _copy(tensor, buffer[low - first : high - first], low - place.offset, span)
    raw = sharing.shared(raw, store, pinned=pinned)
    if pinned:
        pages.pin(raw)
    return raw.view(dtype)[:length], at


def copies(sources: Sequence[torch.Tensor], *, pinned: bool, store: Store | None = None) -> list[torch.Tensor]:
    """Copies of the bytes of host tensors, ``(bytes,)`` uint8 each, in one buffer and each a storage by itself.

    Args:
        sources: ``(bytes,)`` uint8, at least one.
        pinned: register the buffer with CUDA.
        store: share the buffer with ranks that hold the same bytes; None keeps it private.

    Raises:
        H3QuantError: as :func:`pack`.
    """
    buffer, at = pack(sources, pinned=pinned, store=store)
    return [pages.part(buffer, place.offset, source.numel()) for source, place in zip(sources, at, strict=True)]


def _span(tensor: torch.Tensor) -> int:
    """Elements from a tensor's first to its last, in memory."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _copy(tensor: torch.Tensor, target: torch.Tensor, first: int, span: int) -> None:
    """Copy elements of a tensor, in the order in which they lie, from the ``first`` on."""
    if span == tensor.numel():
        # Dense: what lies there is the tensor and nothing else.
        target.copy_(torch.as_strided(tensor, (target.numel(),), (1,), tensor.storage_offset() + first))
        return
    whole = torch.zeros(span, dtype=tensor.dtype, device=tensor.device)
    torch.as_strided(whole, tensor.shape, tensor.stride()).copy_(tensor)
    target.copy_(whole[first : first + target.numel()])
