"""Copies and products keep their order when one of them is slow.

On the host nothing is ever under way, so this needs a GPU. Kernels that only wait are put in front of products, so
that copies run far ahead of them, or in front of copies, so that products come long before their weights.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dit_requests import CONFIGS, MODES, Load, Runs, same

from vllm_h3_quant.dlo.device import Copies

pytestmark = pytest.mark.gpu

CYCLES = 40_000_000
"""Of a kernel that waits: 20 ms or more, in which the host gets several blocks of the tiny model ahead."""


def wait() -> None:
    torch.cuda._sleep(CYCLES)


def slow_products(pipeline: Any) -> None:
    for block in pipeline.transformer.blocks:
        for linear in (block.attn.qkv_proj, block.mlp.fc2, block.adaln_proj.linear):
            linear.register_forward_pre_hook(lambda *_: wait())


def slow_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_omni.diffusion.offloader.distributed_layerwise_backend import DistributedLayerwiseOffloadHook
    from vllm_omni.diffusion.offloader.layerwise_backend import LayerwiseOffloadHook

    for owner, name, stream in (
        (LayerwiseOffloadHook, "prefetch_layer", "copy_stream"),
        (DistributedLayerwiseOffloadHook, "prefetch_layer", "copy_stream"),
        (Copies, "start", "_stream"),
    ):
        monkeypatch.setattr(owner, name, _after_a_wait(getattr(owner, name), stream))


def _after_a_wait(method: Callable[..., Any], stream: str) -> Callable[..., Any]:
    def slow(self: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.cuda.stream(getattr(self, stream)):
            wait()
        return method(self, *args, **kwargs)

    return slow


CASES = [
    (config, mode)
    for config in ("h3_fp8", "host")
    for mode in ("resident", *MODES)
    if (config, mode) != ("h3_fp8", "resident")
]


@pytest.mark.parametrize(("config", "mode"), CASES, ids=map("-".join, CASES))
@pytest.mark.parametrize("slow", ["products", "copies"])
def test_latents_are_the_same(
    models: dict[int, Path],
    load: Load,
    device: torch.device,
    resident: Callable[[int, str], list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    config: str,
    mode: str,
    slow: str,
) -> None:
    expected = resident(3, config)
    if slow == "copies":
        slow_copies(monkeypatch)
    runs = Runs(load(models[3], CONFIGS[config], **MODES.get(mode, {})), device)
    if slow == "products":
        slow_products(runs.pipeline)
    for seed in (0, 1, 0):
        assert same(runs.request(seed), expected[seed])


@pytest.mark.parametrize(("config", "mode"), [("h3_fp8", "layerwise"), ("h3_fp8", "rank-local"), ("host", "resident")])
def test_a_wait_that_is_left_out_shows(
    models: dict[int, Path],
    load: Load,
    device: torch.device,
    resident: Callable[[int, str], list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    config: str,
    mode: str,
) -> None:
    """The delays are long enough for these tests to fail where they should."""
    expected = resident(3, config)
    slow_copies(monkeypatch)
    runs = Runs(load(models[3], CONFIGS[config], **MODES.get(mode, {})), device)
    assert same(runs.request(0), expected[0])
    monkeypatch.setattr(torch.cuda.Stream, "wait_event", lambda self, event: None)
    monkeypatch.setattr(torch.cuda.Stream, "wait_stream", lambda self, stream: None)
    if config == "host":
        runs.pipeline.transformer.adaln_cache.clear()
    try:
        found = runs.request(0)
    except ValueError as error:
        shows = "must be finite" in str(error)  # the engine itself looks at each step
    else:
        shows = not same(found, expected[0])
    assert shows
