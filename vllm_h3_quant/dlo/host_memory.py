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
    offload.install(pack, copies)


def pack(tensors: Sequence[torch.Tensor], *, pinned: bool, ranks: int, rank: int) -> tuple[torch.Tensor, list[Place]]:
    """:func:`packing.pack`, shared with ranks of this engine that hold the same bytes."""
    return packing.pack(tensors, pinned=pinned and pages.can_pin(), store=process_store(), ranks=ranks, rank=rank)


def copies(sources: Sequence[torch.Tensor], *, pinned: bool) -> Sequence[torch.Tensor]:
    """:func:`packing.copies`, shared with ranks of this engine that hold the same bytes.

    The sources themselves where neither pages are to be locked nor another rank could share them.
    """
    pinned, store = pinned and pages.can_pin(), process_store()
    return packing.copies(sources, pinned=pinned, store=store) if pinned or store is not None else sources
