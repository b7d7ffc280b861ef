"""Pipelines of the tiny model without its text encoder."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from dit_requests import CONFIGS, Load, Runs

from vllm_h3_quant.tiny_h3 import TinyH3, write_tiny_h3


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """By their number of blocks."""
    root = tmp_path_factory.mktemp("tiny")
    return {layers: write_tiny_h3(root / str(layers), TinyH3(layers=layers)) for layers in (3, 4)}


@pytest.fixture(scope="module")
def device(one_rank: Any) -> torch.device:
    from vllm_h3_quant.upstream.platform import compute_device

    return compute_device()


@pytest.fixture(scope="module")
def load(device: torch.device) -> Load:
    from harness.engine import load_pipeline

    def loaded(model: Path, config: Any, **fields: Any) -> Any:
        return load_pipeline(
            model,
            {"transformer": config} if config else None,
            pin_cpu_memory=device.type == "cuda",
            model_loaded={"transformer": True, "vae": True, "text_encoder": False, "vae_encoder": True},
            **fields,
        )

    return loaded


@pytest.fixture(scope="module")
def resident(models: dict[int, Path], load: Load, device: torch.device) -> Callable[[int, str], list[Any]]:
    """Latents of two requests with all weights on the device."""

    @cache
    def latents(layers: int, config: str) -> list[Any]:
        kept = CONFIGS[config] | ({"adaln": "keep"} if config == "host" else {})
        runs = Runs(load(models[layers], kept), device)
        assert runs.backend is None
        return [runs.request(0), runs.request(1)]

    return latents
