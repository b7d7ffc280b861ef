"""Puts this package's host memory under the engine's layerwise and distributed offload.

Why: the engine allocates pinned buffers that are rounded to powers of two, packs tensors without alignment, and each
rank keeps its own copy of the same bytes.
Symbols, vLLM-Omni 0.30.0: ``LayerwiseOffloadHook._to_cpu(params, bufs, pin_memory)`` in
``vllm_omni.diffusion.offloader.layerwise_backend``;
``DistributedLayerwiseOffloadHook._shard_and_pin(params, bufs, dp_size, rank, pin_memory, tensor_transforms)`` in
``.distributed_layerwise_backend``;
``PinnedModuleStager._snapshot_groups(modules, pin_memory)`` in ``.module_residency``; and the helpers of
``.tensor_utils``. A tensor's room counts as its ``numel``: the backends take it for the size of a slice of which the
tensor is a view, and add it up for the size of their buffers.
When they move: check who reads ``numel`` of the metadata, and run ``tests/dlo``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from vllm_h3_quant.upstream.preflight import Symbol

_FOLDER = "vllm_omni.diffusion.offloader"
SYMBOLS = (
    Symbol(
        "vllm-omni",
        f"{_FOLDER}.layerwise_backend",
        "LayerwiseOffloadHook._to_cpu",
        ("params", "bufs", "pin_memory"),
    ),
    Symbol(
        "vllm-omni",
        f"{_FOLDER}.distributed_layerwise_backend",
        "DistributedLayerwiseOffloadHook._shard_and_pin",
        ("params", "bufs", "dp_size", "rank", "pin_memory", "tensor_transforms"),
    ),
    Symbol(
        "vllm-omni",
        f"{_FOLDER}.module_residency",
        "PinnedModuleStager._snapshot_groups",
        ("modules", "pin_memory"),
    ),
    Symbol("vllm-omni", f"{_FOLDER}.tensor_utils", "group_named_tensors_by_dtype", ("params", "buffers")),
    Symbol("vllm-omni", f"{_FOLDER}.tensor_utils", "describe_tensor_storage", ("named_tensors", "transforms")),
    Symbol("vllm-omni", f"{_FOLDER}.tensor_utils", "tensor_storage_metadata", ("spec", "offset", "include_device")),
    Symbol("vllm-omni", f"{_FOLDER}.tensor_utils", "clear_tensor_storage", ("tensors",)),
)

Packed = tuple[dict[torch.dtype, torch.Tensor], dict[torch.dtype, list[dict[str, Any]]]]
Named = Mapping[str, torch.Tensor]
_ORIGINAL = "_h3_quant_original"


class Place(Protocol):
    """Where a tensor lies in a buffer, in elements: its first, and how many until the next tensor's first."""

    @property
    def offset(self) -> int: ...

    @property
    def room(self) -> int: ...


class Pack(Protocol):
    """Puts tensors of one dtype into a host buffer, or into one rank's share of it."""

    def __call__(
        self, tensors: Sequence[torch.Tensor], *, pinned: bool, ranks: int, rank: int
    ) -> tuple[torch.Tensor, Sequence[Place]]: ...


class Copies(Protocol):
    """Puts storages, ``(bytes,)`` uint8 each, into host memory; storages of the same lengths."""

    def __call__(self, sources: Sequence[torch.Tensor], *, pinned: bool) -> Sequence[torch.Tensor]: ...


def install(pack: Pack, copies: Copies) -> None:
    """Keep what is offloaded from now on in this process where ``pack`` and ``copies`` put it.

    A second call replaces the first.

    Args:
        pack: for a block's tensors of one dtype.
        copies: for the storages of modules that are offloaded as a whole.
    """
    from vllm_omni.diffusion.offloader.distributed_layerwise_backend import DistributedLayerwiseOffloadHook
    from vllm_omni.diffusion.offloader.layerwise_backend import LayerwiseOffloadHook
    from vllm_omni.diffusion.offloader.module_residency import PinnedModuleStager

    LayerwiseOffloadHook._to_cpu = staticmethod(_packing_block(pack))
    DistributedLayerwiseOffloadHook._shard_and_pin = staticmethod(_packing_share(pack))
    snapshot = _original(PinnedModuleStager._snapshot_groups.__func__)
    PinnedModuleStager._snapshot_groups = classmethod(_copying(snapshot, copies))


def _original(current: Callable[..., Any]) -> Callable[..., Any]:
    original: Callable[..., Any] = getattr(current, _ORIGINAL, current)
    return original


def _packing_block(pack: Pack) -> Callable[..., Packed]:
    def pack_block(params: Named, bufs: Named, pin_memory: bool = True) -> Packed:
        """A block's buffers by dtype, and what lies where; the block's own storage is given up."""
        from vllm_omni.diffusion.offloader.tensor_utils import clear_tensor_storage

        packed, described = _pack(pack, params, bufs, pin_memory, include_device=True)
        # Only now: an error before this leaves the block as it was.
        clear_tensor_storage([*params.values(), *bufs.values()])
        return packed, described

    return pack_block


def _packing_share(pack: Pack) -> Callable[..., Packed]:
    def pack_share(
        params: Named,
        bufs: Named,
        dp_size: int,
        rank: int,
        pin_memory: bool,
        tensor_transforms: dict[int, Any] | None = None,
    ) -> Packed:
        """This rank's share of a block's buffers, all of them of one length, and what lies where in the whole."""
        return _pack(pack, params, bufs, pin_memory, tensor_transforms, ranks=dp_size, rank=rank)

    return pack_share


def _pack(
    pack: Pack,
    params: Named,
    bufs: Named,
    pinned: bool,
    transforms: dict[int, Any] | None = None,
    *,
    ranks: int = 1,
    rank: int = 0,
    include_device: bool = False,
) -> Packed:
    from vllm_omni.diffusion.offloader.tensor_utils import (
        describe_tensor_storage,
        group_named_tensors_by_dtype,
        tensor_storage_metadata,
    )

    packed, described = {}, {}
    for dtype, named in group_named_tensors_by_dtype(params, bufs).items():
        specs = describe_tensor_storage(named, transforms)
        packed[dtype], at = pack([spec.value for spec in specs], pinned=pinned, ranks=ranks, rank=rank)
        described[dtype] = [
            tensor_storage_metadata(spec, place.offset, include_device=include_device) | {"numel": place.room}
            for spec, place in zip(specs, at, strict=True)
        ]
    return packed, described


def _copying(snapshot: Callable[..., Any], copies: Copies) -> Callable[..., Any]:
    """Keep the masters of modules that are staged together in ``copies`` of them."""

    def snapshot_and_copy(cls: Any, modules: Any, *, pin_memory: bool) -> Any:
        groups = snapshot(cls, modules, pin_memory=False)
        filled = [group for group in groups if group.master.numel()]
        if filled:
            masters = copies([group.master for group in filled], pinned=pin_memory)
            for group, master in zip(filled, masters, strict=True):
                group.master = master
        return groups

    setattr(snapshot_and_copy, _ORIGINAL, snapshot)
    return snapshot_and_copy
