"""Two ranks of Ulysses: over gloo on a CPU, over NCCL where there are two GPUs."""

from __future__ import annotations

from pathlib import Path

import children
import pytest
import torch
import ulysses_ranks
from harness.engine import free_port

from vllm_h3_quant.blocks.edges import EXCHANGED


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs two GPUs, or none")
@pytest.mark.timeout(300)
def test_fusion_changes_no_byte(tmp_path: Path) -> None:
    port = free_port()
    children.run(ulysses_ranks.serve, [(rank, 2, port, tmp_path) for rank in (0, 1)], limit=280)
    for rank in (0, 1):
        # Heads and tokens are exchanged between the projection and attention, so that its codes cannot come before.
        edges = f"edges|fused|{EXCHANGED}|{EXCHANGED}|fused|fused"
        assert (tmp_path / str(rank)).read_text().splitlines() == [edges, "same True True"] * 2
