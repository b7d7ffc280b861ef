"""Tensor and sequence parallelism and HSDP over two processes (gloo on a CPU)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import children
import numpy as np
import pytest
import torch
from dump_shards import dump, shards
from engine_process import Generated, generate
from harness.engine import free_port
from safetensors.torch import load_file

# Groups of 128 divide every shard of the tiny model, so that both topologies rotate alike.
CONFIGS: dict[str, dict[str, Any]] = {"h3_fp8": {"method": "h3_fp8"}, "h3_int8": {"method": "h3_int8", "rotation": 128}}
METHODS = pytest.mark.parametrize("method", list(CONFIGS))


@pytest.fixture(scope="module")
def dumped(tiny_h3: Path, exports: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    loads = {method: {"model": str(tiny_h3), "config": config} for method, config in CONFIGS.items()}
    loads["export"] = {"model": str(exports["h3_fp8"]), "config": None}
    port = free_port()
    children.run(dump, [(rank, folder, 2, port, loads) for rank in (0, 1)])
    return folder


@METHODS
def test_shards_are_slices_of_the_single_rank(dumped: Path, load_pipeline: Callable[..., Any], method: str) -> None:
    whole = shards(load_pipeline(CONFIGS[method]))
    ranks = [load_file(dumped / f"{method}.rank{rank}.safetensors") for rank in (0, 1)]
    names = [name.removesuffix(".codes") for name in whole if name.endswith(".codes")]
    assert len(names) == 33
    row_parallel = 0
    for name in names:
        for rank, shard in enumerate(ranks):
            codes, scale = whole[f"{name}.codes"], whole[f"{name}.scale"]
            if shard[f"{name}.row_parallel"]:
                row_parallel += 1
                codes = codes.chunk(2, dim=1)[rank]
            else:
                widths = whole[f"{name}.widths"].tolist()
                codes = torch.cat([part.chunk(2)[rank] for part in codes.split(widths)])
                scale = torch.cat([part.chunk(2, dim=1)[rank] for part in scale.split(widths, dim=1)], dim=1)
            assert torch.equal(shard[f"{name}.codes"], codes), f"{name} codes of rank {rank}"
            assert torch.equal(shard[f"{name}.scale"], scale), f"{name} scales of rank {rank}"
    # Two a block and decoder layer, on both ranks: the text encoder's own group is covered.
    assert row_parallel == 2 * (2 * 3 + 2 * 2 + 2 * 2)


def test_ranks_take_their_shards_of_an_export(dumped: Path) -> None:
    for rank in (0, 1):
        online, export = (load_file(dumped / f"{name}.rank{rank}.safetensors") for name in ("h3_fp8", "export"))
        assert export.keys() == online.keys()
        for name, tensor in online.items():
            assert torch.equal(export[name], tensor), f"{name} of rank {rank}"


# Without step_execution the engine's worker hangs on a machine without an accelerator.
RANKS = {"num_gpus": 2, "step_execution": True}
HSDP = {"use_hsdp": True, "hsdp_shard_size": 2, **RANKS}
ULYSSES = {"quantization_config": "h3_int8_full", "ulysses_degree": 2}


@pytest.fixture(scope="module")
def two_ranks(
    tiny_h3: Path, exports: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, exhaustive: bool
) -> dict[str, Generated]:
    """Starts of two ranks take long: HSDP by itself is in ``test_lora_clips.py`` and ``tests/dlo/test_ranks.py``."""
    arguments: dict[str, dict[str, Any]] = {
        method: {"quantization_config": config, "tensor_parallel_size": 2, **RANKS}
        for method, config in CONFIGS.items()
        if exhaustive or method == "h3_fp8"
    }
    arguments["hsdp ulysses"] = {**ULYSSES, **HSDP}
    if exhaustive:
        arguments["ulysses"] = {**ULYSSES, **RANKS}
    runs: dict[str, dict[str, Any]] = {name: {"arguments": given} for name, given in arguments.items()}
    if exhaustive:
        runs["allgather"] = {
            "model": str(exports["h3_int8_full"]),
            "arguments": {
                "ulysses_degree": 2,
                "enable_distributed_layerwise_offload": True,
                "dlo_use_allgather": True,
                "pin_cpu_memory": False,
                **RANKS,
            },
        }
    return generate(tiny_h3, tmp_path_factory.mktemp("two"), runs, timeout=500)


@pytest.mark.parametrize("method", ["h3_fp8", pytest.param("h3_int8", marks=pytest.mark.exhaustive)])
def test_the_clip_is_that_of_one_rank(
    two_ranks: dict[str, Generated], clips: dict[str, Generated], method: str
) -> None:
    two, one, bf16 = two_ranks[method], clips[{"h3_fp8": "string_fp8", "h3_int8": "string_int8"}[method]], clips["bf16"]
    part, whole = (clip.report.components["transformer"].weight_bytes for clip in (two, one))
    assert 0.5 * whole < part < 0.6 * whole
    # Activations of row-parallel linears get a scale for each half, so codes differ and the distance is
    # that of quantization: as far as one rank is from bf16, with 6 dB to spare.
    assert two.psnr(one) > one.psnr(bf16) - 6


@pytest.mark.parametrize("run", ["hsdp ulysses", pytest.param("ulysses", marks=pytest.mark.exhaustive)])
def test_attention_behind_ulysses_is_that_of_one_rank(
    two_ranks: dict[str, Generated], clips: dict[str, Generated], run: str
) -> None:
    """Each rank attends all tokens with one of the two heads, by the means and scales of the whole documents."""
    two, one = two_ranks[run], clips["full_int8"]
    assert two.report.components["transformer"].attention == one.report.components["transformer"].attention
    assert "8-bit attention leaves calls" not in two.log
    # Products of half the rows may round otherwise, which is less than what quantization does.
    assert two.psnr(one) > one.psnr(clips["bf16"])


@pytest.mark.exhaustive
def test_an_export_may_be_gathered(two_ranks: dict[str, Generated]) -> None:
    """Distributed offload keeps half of each block's codes on a rank and gathers them: not of online methods."""
    assert "dit: allgather" in two_ranks["allgather"].log
    for name, array in two_ranks["ulysses"].arrays.items():
        assert np.array_equal(two_ranks["allgather"].arrays[name], array), name


def test_hsdp_shards_codes_beside_ulysses(two_ranks: dict[str, Generated]) -> None:
    assert "HSDP applied to model" in two_ranks["hsdp ulysses"].log
    assert "unshardable" not in two_ranks["hsdp ulysses"].log, "codes stay whole on every rank"


@pytest.mark.exhaustive
def test_hsdp_changes_nothing_beside_ulysses(two_ranks: dict[str, Generated]) -> None:
    """Each rank runs its half of the tokens from its half of the codes and the other's."""
    for name, array in two_ranks["ulysses"].arrays.items():
        assert np.array_equal(two_ranks["hsdp ulysses"].arrays[name], array), name
