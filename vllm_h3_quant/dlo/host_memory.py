"""What the engine's offload is given for its host memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_h3_quant.dlo import packing, pages
from vllm_h3_quant.dlo.packing import Place
from vllm_h3_quant.upstream import offload
from vllm_h3_quant.upstream.process_store import process_store


def install() -> None:
    """Keep what is offloaded from now on in this process in buffers of this package."""
    offload.install(pack, pinned_copies)


def pack(tensors: Sequence[torch.Tensor], *, pinned: bool, ranks: int, rank: int) -> tuple[torch.Tensor, list[Place]]:
    """:func:`packing.pack`, shared with ranks of this engine that hold the same bytes."""
    return packing.pack(tensors, pinned=pinned and pages.can_pin(), store=process_store(), ranks=ranks, rank=rank)


def pinned_copies(sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """:func:`packing.copies`, pinned, and shared with ranks of this engine that hold the same bytes."""
    return packing.copies(sources, pinned=pages.can_pin(), store=process_store())
