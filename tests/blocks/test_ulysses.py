"""Two ranks of Ulysses: over gloo on a CPU, over NCCL where there are two GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from engine_process import environment
from harness.engine import free_port

from vllm_h3_quant.blocks.edges import EXCHANGED

SCRIPT = Path(__file__).with_name("ulysses_ranks.py")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs two GPUs, or none")
@pytest.mark.timeout(300)
def test_fusion_changes_no_byte() -> None:
    port = str(free_port())
    path = os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")])
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), "2", port],
            env=environment(PYTHONPATH=path),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=280)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for output in outputs:
        lines = [line for line in output.splitlines() if line.startswith(("edges", "same"))]
        # Heads and tokens are exchanged between the projection and attention, so that its codes cannot come before.
        edges = f"edges|fused|{EXCHANGED}|{EXCHANGED}|fused|fused"
        assert lines == [edges, "same True True"] * 2, output[-3000:]
