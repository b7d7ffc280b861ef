"""Clips with a LoRA beside quantized linears: every kind counts, none leaves a trace, wherever weights lie."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from engine_process import Generated, generate
from peft_adapter import write_adapter

from vllm_h3_quant.tiny_h3 import TinyH3

# (N, K) of the tiny DiT's linears by the name of the adapter's module in a block.
_SPEC = TinyH3()
_INNER = 128 * _SPEC.heads
ATTENTION = {f"attn.to_{x}": (_INNER, _SPEC.hidden) for x in "qkv"} | {"attn.out_proj": (_SPEC.hidden, _INNER)}
MLP = {"mlp.fc1": (2 * _SPEC.ffn, _SPEC.hidden), "mlp.fc2": (_SPEC.hidden, _SPEC.ffn)}
ADALN = {"adaln_proj.linear": (18 * _SPEC.hidden, 128)}
KINDS = {"attention": ATTENTION, "mlp": MLP, "adaln": ADALN, "all": ATTENTION | MLP | ADALN}

INT8 = {"quantization": "h3_int8"}
LAYERWISE = {"enable_layerwise_offload": True, "pin_cpu_memory": False}
DISTRIBUTED = {"enable_distributed_layerwise_offload": True, "dlo_use_allgather": False, "pin_cpu_memory": False}
HSDP = {"use_hsdp": True, "hsdp_shard_size": 2, "num_gpus": 2, "step_execution": True}

# Requests to the engine that keeps all weights resident.
WITHOUT, ALL, HALF, WITHOUT_AGAIN, ATTENTION_ONLY, MLP_ONLY, ADALN_ONLY = range(7)


@pytest.fixture(scope="module")
def clips(tiny_h3: Path, tmp_path_factory: pytest.TempPathFactory, exhaustive: bool) -> dict[str, Generated]:
    root = tmp_path_factory.mktemp("lora")
    for kind, linears in KINDS.items():
        shapes = {f"blocks.{i}.{name}": shape for i in range(_SPEC.layers) for name, shape in linears.items()}
        write_adapter(root / kind, shapes)
    path = str(root / "all")
    kinds = [[str(root / kind), 1.0] for kind in ("attention", "mlp", "adaln")]
    runs = {
        "resident": {
            "arguments": {**INT8, "lora_path": path},
            "loras": [None, [path, 1.0], [path, 0.5], None, *kinds],
        },
        "layerwise": {"arguments": {**INT8, **LAYERWISE}, "loras": [[path, 1.0], None]},
        "distributed": {"arguments": {**INT8, **DISTRIBUTED}, "loras": [[path, 1.0], None]},
    }
    if exhaustive:
        runs["hsdp"] = {"arguments": {**INT8, **HSDP}, "loras": [[path, 1.0], None]}
    return generate(tiny_h3, root, runs, timeout=500)


def same(one: Generated, index: int, other: Generated, at: int) -> bool:
    return all(np.array_equal(one.arrays[f"{k}{index}"], other.arrays[f"{k}{at}"]) for k in ("video", "audio"))


def test_a_lora_of_each_kind_of_linear_changes_the_clip(clips: dict[str, Generated]) -> None:
    """None of attention, MLP and AdaLN takes a path around the LoRA, and the scale counts."""
    arrays = clips["resident"].arrays
    for pair in combinations((WITHOUT, ALL, HALF, ATTENTION_ONLY, MLP_ONLY, ADALN_ONLY), 2):
        for kind in ("video", "audio"):
            assert not np.array_equal(*(arrays[f"{kind}{index}"] for index in pair)), (kind, pair)


def test_the_next_request_without_it_gives_the_clip_without_it(clips: dict[str, Generated]) -> None:
    assert same(clips["resident"], WITHOUT, clips["resident"], WITHOUT_AGAIN)


@pytest.mark.parametrize("mode", ["layerwise", "distributed", pytest.param("hsdp", marks=pytest.mark.exhaustive)])
def test_where_the_weights_lie_changes_nothing(clips: dict[str, Generated], mode: str) -> None:
    assert same(clips[mode], 0, clips["resident"], ALL)
    assert same(clips[mode], 1, clips["resident"], WITHOUT)


def test_an_adapter_loaded_at_the_start_waits_for_a_request_that_names_it(clips: dict[str, Generated]) -> None:
    """Requests that name none get the clip of an engine that was started without one."""
    loaded = {name: "Loading LoRA during initialization" in clip.log for name, clip in clips.items()}
    assert loaded == {name: name == "resident" for name in clips}
    assert same(clips["resident"], WITHOUT, clips["layerwise"], 1)
