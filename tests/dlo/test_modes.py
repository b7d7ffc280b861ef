"""Wherever a DiT's weights lie, its latents have the same bytes, request after request and after an error."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dit_requests import (
    CONFIGS,
    LAYERWISE,
    MODES,
    RANK_LOCAL,
    Layout,
    Load,
    Runs,
    content,
    layouts,
    same,
    tensors,
)
from harness.denoise import offload
from peft_adapter import write_adapter

from vllm_h3_quant.dlo import pages
from vllm_h3_quant.dlo.packing import ALIGNMENT
from vllm_h3_quant.export.config import parse_request
from vllm_h3_quant.export.run import export
from vllm_h3_quant.tiny_h3 import TinyH3, write_tiny_h3

CASES = [
    *((3, "h3_fp8", mode) for mode in ("layerwise", "rank-local", "all blocks stay", "public")),
    *((4, "h3_int8", mode) for mode in ("layerwise", "rank-local")),
    *((4, "host", mode) for mode in ("resident", "layerwise", "rank-local", "one block stays", "all blocks stay")),
]
"""Blocks (an odd and an even number of them go round two buffers differently), configuration and mode; "public" is the
engine's other way to ask for one block that stays."""


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(map(str, case)))
def runs(
    request: pytest.FixtureRequest,
    models: dict[int, Path],
    load: Load,
    device: torch.device,
    resident: Callable[[int, str], list[Any]],
) -> Iterator[Runs]:
    layers, config, mode = request.param
    expected = resident(layers, config)
    gc.collect()
    before = pages.held()
    found = Runs(load(models[layers], CONFIGS[config], **MODES.get(mode, {})), device, expected)
    yield found
    found.pipeline = found.backend = None
    gc.collect()
    # The traceback of a failed test holds the pipeline.
    assert request.session.testsfailed or pages.held() == before, "host memory outlives its pipeline"


class TestRequests:
    def test_one_after_the_other(self, runs: Runs) -> None:
        for seed in (0, 1, 0):
            assert same(runs.request(seed), runs.expected[seed])

    def test_a_good_one_after_an_error_in_a_block(self, runs: Runs) -> None:
        def fail(*_: Any) -> None:
            raise MemoryError("in the middle of a block")

        for at, block in enumerate(runs.pipeline.transformer.blocks):
            broken = block.mlp.fc2.register_forward_pre_hook(fail)
            with pytest.raises(MemoryError):
                runs.request(0)
            broken.remove()
            assert same(runs.request(at % 2), runs.expected[at % 2]), f"after an error in block {at}"

    def test_tensors_on_the_device_are_what_was_loaded(self, runs: Runs) -> None:
        seen: dict[str, Layout] = {}
        # The host's own allocator, which stands for the device's here, promises 64 bytes.
        step = ALIGNMENT if runs.device.type == "cuda" else 64

        def look(index: int) -> Callable[..., None]:
            def hook(block: torch.nn.Module, *_: Any) -> None:
                for name, tensor in tensors(block):
                    seen[f"{index}.{name}"] = tensor.dtype, tuple(tensor.shape), tensor.stride(), content(tensor)
                    assert tensor.numel() == 0 or not runs.backend or tensor.data_ptr() % step == 0, name

            return hook

        hooks = [
            block.adaln_proj.register_forward_pre_hook(lambda *a, index=index, block=block: look(index)(block))
            for index, block in enumerate(runs.pipeline.transformer.blocks)
        ]
        runs.request(0)
        for hook in hooks:
            hook.remove()
        assert seen == runs.before

    def test_taken_down_and_set_up_again(self, runs: Runs) -> None:
        if runs.backend is None:
            pytest.skip("no offload")
        runs.backend.disable()
        assert layouts(runs.pipeline) == runs.before
        runs.backend = offload(runs.pipeline, runs.device)
        assert same(runs.request(1), runs.expected[1])


@pytest.mark.parametrize("mode", ["resident", "layerwise", "rank-local"])
def test_a_lora_comes_and_goes(
    models: dict[int, Path], load: Load, device: torch.device, tmp_path: Path, mode: str
) -> None:
    """With AdaLN on the host, requests have the bytes that they have with AdaLN on the device."""
    spec = TinyH3()
    shapes = {"adaln_proj.linear": (18 * spec.hidden, 128), "attn.out_proj": (spec.hidden, 128 * spec.heads)}
    write_adapter(
        tmp_path, {f"blocks.{index}.{name}": shape for index in range(spec.layers) for name, shape in shapes.items()}
    )
    latents = []
    for config, fields in ((CONFIGS["host"] | {"adaln": "keep"}, {}), (CONFIGS["host"], MODES.get(mode, {}))):
        runs = Runs(load(models[spec.layers], config, **fields), device)
        latents.append([runs.request(lora=lora) for lora in (None, (tmp_path, 1.0), (tmp_path, 0.5), None)])
    for on_device, on_host in zip(*latents, strict=True):
        assert same(on_device, on_host)
    without, whole, half, without_again = latents[1]
    assert same(without, without_again)
    assert not any(map(torch.equal, without, whole))
    assert not any(map(torch.equal, half, whole))


def test_host_memory_is_that_of_the_blocks(models: dict[int, Path], load: Load, device: torch.device) -> None:
    """To the page: no rounding to powers of two."""
    gc.collect()
    pipeline = load(models[3], CONFIGS["h3_fp8"], **LAYERWISE)
    before = pages.held().own  # of the VAEs, which are staged whole
    runs = Runs(pipeline, device)
    blocks = runs.pipeline.transformer.blocks
    nbytes = sum(len(layout[3]) for layout in runs.before.values())
    dtypes = {layout[0] for layout in runs.before.values()}
    slack = len(blocks) * len(dtypes) * 4096 + len(runs.before) * ALIGNMENT
    assert nbytes <= pages.held().own - before <= nbytes + slack
    assert pages.held().pinned == (pages.held().own if device.type == "cuda" else 0)


def test_two_dits_in_one_pipeline(tmp_path: Path, load: Load, device: torch.device) -> None:
    """Each has its own weights, though they share buffers on the device and take turns."""
    models = [write_tiny_h3(tmp_path / str(seed), TinyH3(layers=2 + seed, seed=seed)) for seed in (1, 2)]
    expected = []
    for model in models:
        runs = Runs(load(model, CONFIGS["host"]), device)
        expected.append(runs.request(0))
    for mode in (LAYERWISE, RANK_LOCAL, RANK_LOCAL | {"dlo_resident_layers": 1}):
        one, other = (load(model, CONFIGS["host"], **mode) for model in models)
        one.transformers_ref = other.transformer
        one._dit_modules = ["transformer", "transformers_ref"]
        runs = Runs(one, device)
        for _ in range(2):
            assert same(runs.request(0), expected[0])
            cache = one.transformers_ref.adaln_cache
            assert same(runs.request(0, dit=one.transformers_ref), expected[1])
            assert cache.passes > 0


def test_an_export_by_allgather_on_one_rank(tiny_h3: Path, tmp_path: Path, load: Load, device: torch.device) -> None:
    export(tiny_h3, tmp_path / "out", parse_request({"transformer": "h3_fp8"}, where="test"))
    config = {"method": "h3_fp8", "checkpoint": "vllm-h3-quant"}
    expected = Runs(load(tmp_path / "out", config), device).request(0)
    runs = Runs(load(tmp_path / "out", config, enable_distributed_layerwise_offload=True), device)
    for _ in range(2):
        assert same(runs.request(0), expected)
