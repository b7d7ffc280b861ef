"""What a wrong command gets from ``vllm serve``: one clear line at the end and a non-zero exit."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_process import command, run


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--quantization", "h3_fp9"], "unknown method 'h3_fp9'; did you mean 'h3_fp8'?"),
        (
            ["--diffusion-quantization-config", '{"transfomer": {"method": "h3_fp8"}}'],
            "unknown component 'transfomer'; did you mean 'transformer'?",
        ),
        (
            ["--diffusion-quantization-config", '{"method": "h3_int8", "ignored_layers": ["blocks.0.attn.q_proj"]}'],
            "'blocks.0.attn.q_proj' matches no linear; did you mean 'blocks.0.attn.qkv_proj'?",
        ),
        (
            ["--quantization", "h3_fp8", "--diffusion-quantization-config", '{"method": "h3_int8"}'],
            "cannot both be provided",
        ),
        (
            ["--quantization", "h3_fp8", "--enable-distributed-layerwise-offload"],
            "component 'transformer': h3_fp8 quantizes while it loads and cannot be offloaded by AllGather",
        ),
    ],
    ids=["method", "component", "layer", "twice", "allgather"],
)
def test_serve(tiny_h3: Path, arguments: list[str], says: str) -> None:
    common = ["serve", str(tiny_h3), "--omni", "--port", "0", "--trust-remote-code", "--enforce-eager"]
    log = run([command("vllm"), *common, "--task-type", "t2va", *arguments], fails=True)
    last = [line for line in log.splitlines() if line.strip()][-1]
    assert says in last
    assert "Loading weights took" not in log
