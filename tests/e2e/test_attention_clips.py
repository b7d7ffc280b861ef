"""Clips with 8-bit attention, asked for by a preset and by the engine's own option."""

from __future__ import annotations

import numpy as np
import pytest
from engine_process import Generated

Clips = dict[str, Generated]
PRESETS = pytest.mark.parametrize(("full", "plain"), [("full_fp8", "string_fp8"), ("full_int8", "string_int8")])


@PRESETS
def test_presets_quantize_the_blocks_attention(clips: Clips, full: str, plain: str) -> None:
    attention = clips[full].report.components["transformer"].attention
    assert (attention.layers, attention.quantized) == (5, 3)
    assert attention.kept == {"token refiner, not asked for": 2}
    assert clips[full].quantized == clips[plain].quantized
    assert clips[full].report.method == clips[plain].report.method
    (kernel,) = attention.kernels
    assert f"transformer: 3 of 5 attention layers in 8 bits ({kernel}), auto: {attention.why}" in clips[full].log
    assert clips[plain].report.components["transformer"].attention.quantized == 0
    assert "attention layers" not in clips[plain].log


@PRESETS
def test_attention_moves_the_clip_less_than_the_linears_do(clips: Clips, full: str, plain: str) -> None:
    """Its products have the linears' 8 bits, and it is one of a block's five. 3 dB to spare."""
    assert not np.array_equal(clips[full].video, clips[plain].video)
    assert np.isfinite(clips[full].audio).all()
    assert clips[full].psnr(clips[plain]) > clips[plain].psnr(clips["bf16"]) - 3


@pytest.mark.parametrize("full", ["full_fp8", "full_int8", "engine_option"])
def test_no_call_is_left_to_the_engine(clips: Clips, full: str) -> None:
    """The mask and the documents that the CPU's backend is given are the packing's own."""
    assert "8-bit attention leaves calls" not in clips[full].log


def test_requests_in_one_forward_do_not_see_each_other(clips: Clips) -> None:
    log, arrays = clips["full_fp8"].log, clips["full_fp8"].arrays
    assert "denoise step: 2 request(s) packed" in log
    for kind in ("video", "audio"):
        cat, dog, cat_alone, dog_alone = (arrays[f"{kind}{index}"] for index in range(4))
        assert not np.array_equal(cat, dog)
        # Another number of rows may take another product of the same values.
        for together, alone in ((cat, cat_alone), (dog, dog_alone)):
            distance = np.abs(together.astype(np.float64) - alone)
            assert distance.mean() < 0.01 * np.abs(alone.astype(np.float64)).mean()


def test_the_engines_option_works_without_a_quantization(clips: Clips) -> None:
    clip, bf16 = clips["engine_option"], clips["bf16"]
    attention = clip.report.components["transformer"].attention
    assert clip.report.method is None
    assert clip.quantized == {"transformer": 0, "text_encoder": 0}
    assert attention.quantized == 2
    assert attention.kept == {"token refiner, not asked for": 2, "skipped by selector": 1}
    assert "2 of 5 attention layers in 8 bits" in clip.log
    assert not np.array_equal(clip.video, bf16.video)
    # As above: no further than FP8 linears, with 3 dB to spare.
    assert clip.psnr(bf16) > clips["string_fp8"].psnr(bf16) - 3
