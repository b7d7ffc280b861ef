"""What a wrong command gets from ``vllm serve``: one clear line at the end and a non-zero exit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from engine_process import command, run, script

METHOD = (["--quantization", "h3_fp9"], "unknown method 'h3_fp9'; did you mean 'h3_fp8'?")
STAGE = '{"0": {"quantization_config": {"method": "h3_fp8", "fusee": false}}}'
WRONG: dict[str, tuple[list[str], str]] = {
    "method": METHOD,
    "component": (
        ["--diffusion-quantization-config", '{"transfomer": {"method": "h3_fp8"}}'],
        "unknown component 'transfomer'; did you mean 'transformer'?",
    ),
    "layer": (
        ["--diffusion-quantization-config", '{"method": "h3_int8", "ignored_layers": ["blocks.0.attn.q_proj"]}'],
        "'blocks.0.attn.q_proj' matches no linear; did you mean 'blocks.0.attn.qkv_proj'?",
    ),
    "key": (
        ["--diffusion-quantization-config", '{"text_encoder": {"method": "h3_fp8", "fuse": false}}'],
        "component 'text_encoder': fuse=False is for the layers of 'transformer'",
    ),
    "stage": (
        ["--stage-overrides", STAGE],
        "stage 0: quantization 'h3_fp8': unknown key of h3_fp8 'fusee'; did you mean",
    ),
    "dtype": (["--quantization", "h3_fp8", "--dtype", "half"], "dtype='float16': h3_fp8 takes activations in bfloat16"),
    "task": (["--quantization", "h3_fp8", "--task-type", "ref2va"], "holds no Ref2VA/, which --task-type ref2va needs"),
    "twice": (
        ["--quantization", "h3_fp8", "--diffusion-quantization-config", '{"method": "h3_int8"}'],
        "cannot both be provided",
    ),
    "allgather": (
        ["--quantization", "h3_fp8", "--enable-distributed-layerwise-offload"],
        "component 'transformer': h3_fp8 quantizes while it loads and cannot be offloaded by AllGather",
    ),
}


def serve(model: Path, arguments: list[str]) -> list[str]:
    common = ["serve", str(model), "--omni", "--port", "0", "--trust-remote-code", "--enforce-eager"]
    return [*common, *([] if "--task-type" in arguments else ["--task-type", "t2va"]), *arguments]


def check(log: str, says: str, *, ours: bool = True) -> None:
    last = [line for line in log.splitlines() if line.strip()][-1]
    assert says in last
    assert "Loading weights took" not in log
    if ours:
        assert "vllm: error: " in last
        assert log.count(says) == 1
        assert "H3QuantError" not in log, "a traceback"


@pytest.fixture(scope="module")
def served(tiny_h3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wrong")
    lines = {name: serve(tiny_h3, arguments) for name, (arguments, _) in WRONG.items()}
    script("forked_commands.py", str(out), json.dumps(lines))
    return out


@pytest.mark.parametrize("name", list(WRONG))
def test_serve(served: Path, name: str) -> None:
    assert int((served / f"{name}.status").read_text()) > 0
    check((served / f"{name}.log").read_text(), WRONG[name][1], ours=name != "twice")


def test_the_command_itself(tiny_h3: Path) -> None:
    """Not a fork of a process that has imported the engine; the first to look at the model is this package."""
    log = run([command("vllm"), *serve(tiny_h3 / "transformer", ["--quantization", "h3_fp8"])], fails=True)
    check(log, f"model: {tiny_h3 / 'transformer'} is a part of the model {tiny_h3}; give {tiny_h3}")
    assert "Repo id" not in log
