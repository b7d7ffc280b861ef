"""Compiled blocks share their graphs wherever AdaLN's weights are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from dit_requests import CONFIGS, Load, Runs, same
from torch._dynamo.testing import CompileCounter

from vllm_h3_quant.tiny_h3 import TinyH3, write_tiny_h3

LAYERS = 12
"""More than the graphs that the compiler makes of one function before it gives up on it."""


def compiled(pipeline: Any, device: torch.device) -> tuple[int, list[Any]]:
    """Graphs that a DiT's blocks become in two requests, and the latents."""
    from vllm_omni.diffusion.compile import regionally_compile

    torch._dynamo.reset()
    counter = CompileCounter()
    regionally_compile(pipeline.transformer, backend=counter)
    runs = Runs(pipeline, device)
    latents = [runs.request(seed) for seed in (0, 1)]
    return counter.frame_count, latents


def test_blocks_share_graphs(load: Load, device: torch.device, tmp_path: Path) -> None:
    assert torch._dynamo.config.recompile_limit < LAYERS
    model = write_tiny_h3(tmp_path / "deep", TinyH3(layers=LAYERS))
    host = load(model, CONFIGS["host"])
    graphs, latents = compiled(host, device)
    kept_graphs, expected = compiled(load(model, CONFIGS["host"] | {"adaln": "keep"}), device)
    assert graphs == kept_graphs > 0
    assert all(map(same, latents, expected))
    assert host.transformer.adaln_cache.passes == 1
