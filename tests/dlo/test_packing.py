"""Tensors in one buffer keep everything that a kernel asks of them."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_h3_quant.dlo.packing import ALIGNMENT, pack, places
from vllm_h3_quant.dlo.sharing import SMALLEST

DTYPES = [torch.float8_e4m3fn, torch.int8, torch.bfloat16, torch.float32, torch.int64]


def tensors_of(dtype: torch.dtype) -> list[torch.Tensor]:
    def random(*shape: int) -> torch.Tensor:
        return torch.randint(0, 100, shape).to(torch.float32).to(dtype)

    return [
        random(48, 33).t(),  # codes: (K, N) with stride (1, K)
        random(1, 33),
        random(7),
        random(5, 6)[:, ::2],  # with holes
        random(3, 4, 5).permute(2, 0, 1),
        random(0),
        random(1).reshape(()),
        random(20)[3:9],
    ]


def unpack(whole: torch.Tensor, tensor: torch.Tensor, offset: int, room: int) -> torch.Tensor:
    """As the engine's backends make a tensor of its part of a buffer."""
    return torch.as_strided(whole[offset : offset + room], tensor.shape, tensor.stride())


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_strides_and_alignment_survive(dtype: torch.dtype) -> None:
    tensors = tensors_of(dtype)
    buffer, at = pack(tensors, pinned=False)
    assert buffer.dtype is dtype
    for tensor, place in zip(tensors, at, strict=True):
        found = unpack(buffer, tensor, place.offset, place.room)
        assert found.stride() == tensor.stride()
        assert torch.equal(found.float(), tensor.float())
        assert not tensor.numel() or found.data_ptr() % ALIGNMENT == 0


def test_only_what_is_shared_takes_open_files() -> None:
    before = len(os.listdir("/proc/self/fd"))
    small, _ = pack([torch.zeros(400, dtype=torch.int8)], pinned=False, store=torch.distributed.HashStore())
    assert len(os.listdir("/proc/self/fd")) == before
    large, _ = pack([torch.zeros(SMALLEST, dtype=torch.int8)], pinned=False, store=torch.distributed.HashStore())
    assert len(os.listdir("/proc/self/fd")) > before
    assert small.numel() < large.numel()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_shares_of_ranks_make_up_the_whole(dtype: torch.dtype, ranks: int) -> None:
    tensors = tensors_of(dtype)
    whole, at = pack(tensors, pinned=False)
    shares = [pack(tensors, pinned=False, ranks=ranks, rank=rank) for rank in range(ranks)]
    assert len({share.shape for share, _ in shares}) == 1
    assert all(places == at for _, places in shares)
    together = torch.cat([share for share, _ in shares])
    assert torch.equal(together[: whole.numel()].view(torch.uint8), whole.view(torch.uint8))
    assert not together[whole.numel() :].view(torch.uint8).any()


@settings(deadline=None)
@given(st.lists(st.integers(0, 10_000), min_size=1), st.sampled_from([1, 2, 4, 8, 256]))
def test_places_do_not_meet_and_waste_less_than_the_alignment(sizes: list[int], itemsize: int) -> None:
    at = places(sizes, itemsize)
    end = 0
    for size, place in zip(sizes, at, strict=True):
        assert place.offset == end
        assert place.room >= size
        assert place.offset * itemsize % ALIGNMENT == 0
        assert (place.room - size) * itemsize < max(ALIGNMENT, itemsize)
        end = place.offset + place.room
