"""One copy a host of weights that several ranks hold alike.

Under Ulysses, data parallelism and HSDP's replicas every rank offloads the same bytes. Which ranks those are follows
from the topology, the checkpoint and the adapters; here nothing is derived from them. A rank that has packed some
weights names them by their size and two sums over them in the store through which the ranks met, the first to do so
shows where its copy lies, and the others compare theirs with it byte by byte before they let go of their own. A rank
that cannot reach the copy or pin it, or finds other bytes in it, keeps its own.
"""

from __future__ import annotations

import os
from collections import Counter
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Protocol

import torch

from vllm_h3_quant.dlo import pages
from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.log import get_logger

logger = get_logger(__name__)

SMALLEST = 2**20
"""Bytes below which a copy is not shared: each costs two open files."""

WAIT = timedelta(seconds=60)
"""How long a rank waits for another that has said it has the bytes; there is nothing left for that one to do."""

_PIECE = 2**26
_times: Counter[str] = Counter()


class Store(Protocol):
    """What is used of ``torch.distributed.Store``."""

    def add(self, key: str, amount: int, /) -> int: ...

    def set(self, key: str, value: str, /) -> None: ...

    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...


def shared(mine: torch.Tensor, store: Store | None, *, pinned: bool) -> torch.Tensor:
    """``mine``, or the same bytes in the memory of another rank of this host.

    Args:
        mine: what :func:`pages.allocate` returned as shareable, filled.
        store: where the ranks meet; None where there is one.
        pinned: whether another rank's pages are registered with CUDA here too.
    """
    if store is None or mine.numel() < SMALLEST:
        return mine
    # Offload may be taken down and set up again: the n-th time meets the n-th time of the others.
    name = f"{_host()}/{mine.numel()}/{_sums(mine)}"
    _times[name] += 1
    key = f"h3-quant/{name}/{_times[name]}"
    if store.add(f"{key}/ranks", 1) == 1:
        store.set(key, f"{os.getpid()} {pages.file_of(mine)}")
        return mine
    try:
        store.wait([key], WAIT)
        pid, fd = (int(part) for part in store.get(key).split())
        theirs = pages.attach(pid, fd, mine.numel(), pinned=pinned)
    except (OSError, RuntimeError, H3QuantError) as error:
        logger.warning("%.2f GiB of weights are held twice on this host: %s", mine.numel() / 2**30, error)
        return mine
    return theirs if _same(mine, theirs) else mine


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether all bytes are; words of eight are compared three times as fast as bytes."""
    whole = one.numel() // 8 * 8
    words = torch.equal(one[:whole].view(torch.int64), other[:whole].view(torch.int64))
    return words and torch.equal(one[whole:], other[whole:])


def _sums(data: torch.Tensor) -> str:
    """Two sums over the bytes, the second one by place; equal for equal bytes."""
    words = data[: data.numel() // 8 * 8].view(torch.int64)
    total = by_place = 0
    for place, piece in enumerate(words.split(_PIECE // 8), start=1):
        found = int(piece.sum())
        total += found
        by_place += place * found
    tail = bytes(data[words.numel() * 8 :].tolist()).hex()
    return f"{total & (2**64 - 1):x}-{by_place & (2**64 - 1):x}-{tail}"


@cache
def _host() -> str:
    """This boot of this machine, as far as its processes see each other."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
