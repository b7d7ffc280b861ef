"""Clips with fused blocks: what comes out is the same to the last bit, whatever wraps the blocks."""

from __future__ import annotations

import numpy as np
import pytest
from engine_process import Generated

from vllm_h3_quant.blocks.edges import ROWS_LATER, Edge

EDGES = 5 * 3
"""Of the tiny model's three blocks."""


def same(one: Generated, other: Generated, request: int = 0) -> bool:
    """Whether a request of one run gave what the first of the other gave."""
    return all(np.array_equal(one.arrays[f"{kind}{request}"], other.arrays[f"{kind}0"]) for kind in ("video", "audio"))


@pytest.mark.parametrize(
    ("fused", "plain", "request_of_fused", "kept"),
    [
        ("full_fp8", "unfused_fp8", 2, {}),
        ("full_int8", "unfused_int8", 0, {f"{Edge.OUT.value} ({ROWS_LATER})": 3}),
    ],
)
def test_fusion_changes_nothing(
    clips: dict[str, Generated], fused: str, plain: str, request_of_fused: int, kept: dict[str, int]
) -> None:
    assert same(clips[fused], clips[plain], request_of_fused)
    fusion = clips[fused].report.components["transformer"].fusion
    assert (fusion.edges, fusion.fused, fusion.kept) == (EDGES, EDGES - sum(kept.values()), kept)
    assert f"{fusion.fused} of {EDGES} edges of the blocks fused" in clips[fused].log
    assert clips[plain].report.components["transformer"].fusion.edges == 0
    assert "edges of the blocks" not in clips[plain].log


def test_cache_dit_wraps_fused_blocks(clips: dict[str, Generated]) -> None:
    """Its first steps compute every block, so that two steps are those of a run without it."""
    assert "Enabling cache-dit" in clips["cached"].log
    assert same(clips["cached"], clips["full_int8"])


@pytest.mark.parametrize("run", ["layerwise", "distributed"])
def test_offloaded_blocks_are_fused(clips: dict[str, Generated], run: str) -> None:
    resident = {"layerwise": "string_fp8", "distributed": "string_int8"}[run]
    fusion = clips[run].report.components["transformer"].fusion
    assert fusion == clips[resident].report.components["transformer"].fusion
    assert fusion.fused == 3 * 3, "norms and SwiGLU of three blocks; attention is the engine's"
    assert same(clips[run], clips[resident])
