"""Two ranks, over gloo without GPUs: the same latents wherever the weights lie, and one copy of them a host."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import children
import pytest
import torch
from dit_requests import Load
from harness.denoise import denoise, denoise_inputs
from offload_ranks import CLIP, STEPS, serve

from vllm_h3_quant.export.config import parse_request
from vllm_h3_quant.export.run import export

LAYERWISE = {"enable_layerwise_offload": True}
RANK_LOCAL = {"enable_distributed_layerwise_offload": True, "dlo_use_allgather": False}
ALLGATHER = {"enable_distributed_layerwise_offload": True}
KEEP, HOST = ({"transformer": {"method": "h3_fp8", "adaln": adaln}} for adaln in ("keep", "host"))
PAGE = os.sysconf("SC_PAGESIZE")

pytestmark = [
    pytest.mark.timeout(290),
    pytest.mark.skipif(torch.cuda.device_count() == 1, reason="each of two ranks needs a GPU of its own"),
]


@pytest.fixture(scope="module")
def found(tiny_h3: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each rank saved of each run."""
    out = tmp_path_factory.mktemp("ranks")
    exported = out / "export"
    # gloo has no 8-bit floats; codes of an export are the same for all ranks, which is what gathering needs.
    export(tiny_h3, exported, parse_request({"transformer": {"method": "h3_int8"}}, where="test"))
    tiny, stored = str(tiny_h3), {"transformer": {"method": "h3_int8", "checkpoint": "vllm-h3-quant"}}
    runs = {
        "keep": (tiny, KEEP, {}, "ulysses"),
        "host": (tiny, HOST, {}, "ulysses"),
        "host layerwise": (tiny, HOST, LAYERWISE, "ulysses"),
        "host rank-local": (tiny, HOST, RANK_LOCAL, "ulysses"),
        "export": (str(exported), stored, {}, "ulysses"),
        "export allgather": (str(exported), stored, ALLGATHER, "ulysses"),
        "tp keep": (tiny, KEEP, {}, "tensor_parallel"),
        "tp host": (tiny, HOST, {}, "tensor_parallel"),
        "tp host rank-local": (tiny, HOST, RANK_LOCAL, "tensor_parallel"),
        "hsdp keep": (tiny, KEEP, {}, "hsdp"),
        "hsdp host": (tiny, HOST, {}, "hsdp"),
    }
    named = {name: dict(zip(("model", "config", "fields", "split"), run, strict=True)) for name, run in runs.items()}
    children.run(serve, [(rank, out, named) for rank in (0, 1)], limit=280)
    return {name: [torch.load(out / f"{name}.rank{rank}.pt") for rank in (0, 1)] for name in runs}


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("host", "keep"),
        ("host layerwise", "keep"),
        ("host rank-local", "keep"),
        ("export allgather", "export"),
        ("tp host", "tp keep"),
        ("tp host rank-local", "tp keep"),
        ("hsdp host", "hsdp keep"),
    ],
)
def test_latents_have_the_same_bytes(found: dict[str, list[Any]], name: str, reference: str) -> None:
    for ours, theirs in zip(found[name], found[reference], strict=True):
        for request in ours["latents"]:
            assert all(map(torch.equal, request, theirs["latents"][0]))


def test_hsdp_gives_the_latents_of_one_rank(
    found: dict[str, list[Any]], tiny_h3: Path, load: Load, device: torch.device
) -> None:
    """Each rank runs the whole forward from its half of the codes and the other's."""
    pipeline = load(tiny_h3, KEEP["transformer"])
    inputs = denoise_inputs(pipeline, CLIP, schedule=STEPS)
    expected = denoise(pipeline, inputs, pipeline.transformer, steps=STEPS, device=device)
    for rank in found["hsdp keep"]:
        assert all(torch.equal(one, other.cpu()) for one, other in zip(rank["latents"][0], expected, strict=True))


@pytest.mark.parametrize("name", ["host", "host layerwise", "host rank-local"])
def test_what_ranks_hold_alike_is_there_once(found: dict[str, list[Any]], name: str) -> None:
    ranks = [rank["held"] for rank in found[name]]
    everything = {rank["own"] + rank["foreign"] for rank in ranks}
    assert len(everything) == 1
    # Small buffers are not shared: two ranks have them each.
    own = sum(rank["own"] for rank in ranks)
    assert everything.pop() <= own <= 1.02 * (ranks[0]["own"] + ranks[0]["foreign"]) + 16 * PAGE


def test_shares_of_tensor_parallel_ranks_are_their_own(found: dict[str, list[Any]]) -> None:
    assert all(rank["held"]["foreign"] == 0 for rank in found["tp host"])


def test_a_rank_holds_its_share_of_what_is_gathered(found: dict[str, list[Any]]) -> None:
    one, other = (rank["held"]["own"] for rank in found["export allgather"])
    assert abs(one - other) <= PAGE
    assert not found["export allgather"][0]["held"]["foreign"]
