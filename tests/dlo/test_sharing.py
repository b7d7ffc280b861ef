"""Ranks of a host that hold the same bytes keep one copy of them."""

from __future__ import annotations

import gc
import os
import time
from datetime import timedelta
from pathlib import Path

import children
import pytest
import torch
from cuda_runtime import Runtime

from vllm_h3_quant.dlo import pages, sharing
from vllm_h3_quant.dlo.packing import ALIGNMENT, copies
from vllm_h3_quant.dlo.sharing import SMALLEST, shared

NBYTES = SMALLEST + 4099


def weights(seed: int, nbytes: int = NBYTES) -> torch.Tensor:
    tensor = pages.allocate(nbytes, pinned=False, shareable=True)
    return tensor.copy_(torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.manual_seed(seed)))


def in_ranks(path: Path, work: str, ranks: int = 2) -> list[str]:
    """Run a function of this module in processes that meet in one store; what each of them returned."""
    path.mkdir()
    children.run(rank_of, [(path, work, ranks, rank) for rank in range(ranks)])
    return [(path / f"{rank}").read_text() for rank in range(ranks)]


def rank_of(path: Path, work: str, ranks: int, rank: int) -> None:
    torch.set_num_threads(1)
    found = globals()[work](torch.distributed.FileStore(str(path / "store"), ranks), rank)
    (path / f"{rank}").write_text(str(found))


def meet(store: torch.distributed.Store, rank: int, name: str, ranks: int = 2) -> None:
    """Wait until every rank is here: until then the first rank's copy must stay."""
    store.add(name, 1)
    deadline = time.monotonic() + 60
    while store.add(name, 0) < ranks:
        assert time.monotonic() < deadline, f"no other rank came to {name}"
        time.sleep(0.001)


def alike(store: torch.distributed.Store, rank: int) -> tuple[int, int, bool]:
    mine = shared(weights(1), store, pinned=False)
    meet(store, rank, "shared")
    gc.collect()
    found = pages.held()
    right = torch.equal(mine, weights(1))
    meet(store, rank, "done")
    return found.own, found.foreign, right


def test_the_same_bytes_are_held_once(tmp_path: Path) -> None:
    found = in_ranks(tmp_path / "ranks", "alike")
    page = os.sysconf("SC_PAGESIZE")
    whole = -(-NBYTES // page) * page
    assert sorted(found) == sorted([str((0, whole, True)), str((whole, 0, True))])


def apart(store: torch.distributed.Store, rank: int) -> tuple[bool, bool]:
    mine = shared(weights(rank), store, pinned=False)
    meet(store, rank, "shared")
    return pages.held().foreign == 0, torch.equal(mine, weights(rank))


def test_other_bytes_are_held_by_each(tmp_path: Path) -> None:
    assert in_ranks(tmp_path / "ranks", "apart") == ["(True, True)"] * 2


def confused(store: torch.distributed.Store, rank: int) -> tuple[bool, bool]:
    sharing._sums = lambda data: "alike"
    return apart(store, rank)


def test_sums_that_agree_by_chance_do_no_harm(tmp_path: Path) -> None:
    assert in_ranks(tmp_path / "ranks", "confused") == ["(True, True)"] * 2


def confused_at_the_end(store: torch.distributed.Store, rank: int) -> tuple[bool, bool]:
    sharing._sums = lambda data: "alike"
    mine = weights(1)
    mine[-1] = rank
    kept = shared(mine, store, pinned=False)
    meet(store, rank, "shared")
    return pages.held().foreign == 0, int(kept[-1]) == rank


def test_no_byte_is_left_out_of_the_comparison(tmp_path: Path) -> None:
    assert NBYTES % 8
    assert in_ranks(tmp_path / "ranks", "confused_at_the_end") == ["(True, True)"] * 2


def staged(store: torch.distributed.Store, rank: int) -> tuple[int, int, bool]:
    sources = [weights(1), weights(2, 5), weights(3)]
    masters = copies(sources, pinned=False, store=store)
    expected = [source.clone() for source in sources]
    del sources
    gc.collect()
    meet(store, rank, "shared")
    held = pages.held()
    right = all(map(torch.equal, masters, expected))
    apart = len({master.untyped_storage().data_ptr() for master in masters}) == len(masters)
    meet(store, rank, "done")
    return held.own, held.foreign, right and apart


def test_modules_that_are_staged_whole_are_held_once(tmp_path: Path) -> None:
    found = in_ranks(tmp_path / "ranks", "staged")
    page = os.sysconf("SC_PAGESIZE")
    whole = -(-(2 * (-(-NBYTES // ALIGNMENT) * ALIGNMENT) + ALIGNMENT) // page) * page
    assert sorted(found) == sorted([str((0, whole, True)), str((whole, 0, True))])


def again(store: torch.distributed.Store, rank: int) -> tuple[int, bool]:
    mine = shared(weights(1), store, pinned=False)
    meet(store, rank, "first")
    del mine
    gc.collect()
    meet(store, rank, "dropped")
    mine = shared(weights(1), store, pinned=False)
    meet(store, rank, "second")
    gc.collect()
    held = pages.held()
    meet(store, rank, "done")
    return (held.own > 0) + (held.foreign > 0), torch.equal(mine, weights(1))


def test_offload_that_was_taken_down_is_shared_again(tmp_path: Path) -> None:
    """The second time nobody takes what lies where the first copy lay."""
    assert in_ranks(tmp_path / "ranks", "again") == ["(1, True)"] * 2


def unreachable(store: torch.distributed.Store, rank: int) -> bool:
    if rank == 0:
        shared(weights(1), store, pinned=False)  # dropped at once: its number is free for another file
        gc.collect()
        meet(store, rank, "gone")
        return True
    meet(store, rank, "gone")
    mine = weights(1)
    return shared(mine, store, pinned=False) is mine


def test_a_copy_that_is_gone_leaves_a_rank_its_own(tmp_path: Path) -> None:
    assert in_ranks(tmp_path / "ranks", "unreachable") == ["True", "True"]


def test_a_rank_that_never_says_where_is_waited_for_and_then_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "WAIT", timedelta(milliseconds=50))
    store = torch.distributed.HashStore()
    mine = weights(5)
    name = f"{sharing._host()}/{mine.numel()}/{sharing._sums(mine)}"
    store.add(f"h3-quant/{name}/{sharing._times[name] + 1}/ranks", 1)
    assert shared(mine, store, pinned=False) is mine


def test_a_copy_that_cannot_be_pinned_here_leaves_a_rank_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    store = torch.distributed.HashStore()
    first, second = weights(6), weights(6)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime(error=2))
    assert shared(first, store, pinned=True) is first
    monkeypatch.setitem(sharing._times, next(name for name in sharing._times if f"/{NBYTES}/" in name), 0)
    assert shared(second, store, pinned=True) is second


def test_one_rank_and_small_copies_are_left_alone() -> None:
    mine = weights(1)
    assert shared(mine, None, pinned=False) is mine
    small = weights(1, SMALLEST - 1)
    assert shared(small, torch.distributed.HashStore(), pinned=False) is small
