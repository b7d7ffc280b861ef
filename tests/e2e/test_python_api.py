"""``Omni(...)`` with every form of configuration, each a real engine run."""

from __future__ import annotations

import numpy as np
import pytest
from engine_process import Generated

Clips = dict[str, Generated]


@pytest.mark.parametrize(
    ("run", "transformer", "text_encoder"),
    [
        ("string_fp8", 25, 8),
        ("string_int8", 25, 8),
        ("mapping", 23, 6),
        ("mapping_int8", 21, 8),
        ("transformer", 25, 0),
        ("text_encoder", 0, 8),
        ("both", 25, 8),
        ("both_strings", 25, 8),
        ("null", 25, 0),
        ("replaced_fp8", 25, 8),
        ("replaced_int8", 25, 8),
    ],
)
def test_forms(clips: Clips, run: str, transformer: int, text_encoder: int) -> None:
    clip, bf16 = clips[run], clips["bf16"]
    assert clip.quantized == {"transformer": transformer, "text_encoder": text_encoder}
    assert clip.video.shape == bf16.video.shape == (107, 64, 64, 3)
    assert clip.audio.shape == bf16.audio.shape
    assert np.isfinite(clip.audio).all()
    assert not np.array_equal(clip.video, bf16.video), "the quantized model gave the unquantized clip"
    # Two steps of a three-block model; a wrong scale or layout gives an unrelated clip, below 15 dB.
    assert clip.psnr(bf16) > 25


def test_nothing_is_quantized_unasked(clips: Clips) -> None:
    assert clips["bf16"].quantized == {"transformer": 0, "text_encoder": 0}
    assert clips["bf16"].report.method is None


def test_the_same_request_twice_is_the_same_clip(clips: Clips) -> None:
    arrays = clips["string_int8"].arrays
    for kind in ("video", "audio"):
        assert np.array_equal(arrays[f"{kind}0"], arrays[f"{kind}1"])


def test_equal_configurations_give_equal_clips(clips: Clips) -> None:
    assert np.array_equal(clips["both"].video, clips["both_strings"].video)
    assert np.array_equal(clips["replaced_fp8"].video, clips["string_fp8"].video)


def test_offload_changes_nothing(clips: Clips) -> None:
    """Codes and scales come back from the host with their layout: the clip is the resident one."""
    assert np.array_equal(clips["layerwise"].video, clips["string_fp8"].video)
    assert np.array_equal(clips["distributed"].video, clips["string_int8"].video)


@pytest.mark.parametrize(("plain", "ours"), [("fp8", "h3_fp8"), ("int8", "h3_int8")])
def test_the_log_says_what_replaces_a_name(clips: Clips, plain: str, ours: str) -> None:
    clip = clips[f"replaced_{plain}"]
    assert clip.report.method == ours
    assert f"{plain} is served by {ours} (VLLM_H3_QUANT_REPLACE)" in clip.log


def test_the_log_says_what_is_quantized(clips: Clips) -> None:
    assert "transformer: 25 of 31 linears quantized by h3_fp8" in clips["string_fp8"].log
    assert "text_encoder: 8 of 8 linears quantized by h3_fp8" in clips["string_fp8"].log


def test_the_report_counts_bytes(clips: Clips) -> None:
    whole, half = (clips[run].report.components["text_encoder"].weight_bytes for run in ("bf16", "string_fp8"))
    # One byte for two, and one fp32 scale a row.
    assert half < 0.51 * whole
