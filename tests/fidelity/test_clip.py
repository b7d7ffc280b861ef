"""MP4s written and read back, and files that are no clip."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import av
import pytest
import torch
from clips import make_clip

from vllm_h3_quant.fidelity.clip import read_clip, write_clip
from vllm_h3_quant.fidelity.metrics import psnr_db, snr_db


@pytest.mark.parametrize("fps", [24.0, 24000 / 1001])
def test_round_trip_keeps_picture_sound_and_rates(tmp_path: Path, fps: float) -> None:
    clip = make_clip(fps=fps)
    write_clip(tmp_path / "clip.mp4", clip)
    back = read_clip(tmp_path / "clip.mp4")
    assert (back.video_codec, back.audio_codec, back.sample_rate) == ("h264", "aac", 32000)
    assert back.fps == pytest.approx(fps)
    assert back.frames.shape == clip.frames.shape
    assert psnr_db(torch.from_numpy(back.frames), torch.from_numpy(clip.frames)) > 30
    # AAC pads the end to a whole block; a delay at the start would leave an SNR of about 0 dB.
    samples = clip.audio.shape[1]
    assert 0 <= back.audio.shape[1] - samples < 1024
    assert snr_db(torch.from_numpy(back.audio[:, :samples]), torch.from_numpy(clip.audio)) > 20


def test_channels_keep_their_order_and_mono_stays_mono(tmp_path: Path) -> None:
    stereo, mono = make_clip(), make_clip(channels=1)
    stereo.audio[1] = 0
    for name, clip in (("stereo.mp4", stereo), ("mono.mp4", mono)):
        write_clip(tmp_path / name, clip)
    left, right = read_clip(tmp_path / "stereo.mp4").audio
    assert abs(left).mean() > 100 * abs(right).mean()
    assert len(read_clip(tmp_path / "mono.mp4").audio) == 1


def test_durations_are_counts_over_rates() -> None:
    clip = make_clip(frames=48)
    assert clip.video_seconds == pytest.approx(2.0)
    assert replace(clip, audio=clip.audio[:, :16000]).audio_seconds == pytest.approx(0.5)


def test_clip_without_sound_is_refused(tmp_path: Path) -> None:
    with av.open(str(tmp_path / "mute.mp4"), "w") as container:
        stream = container.add_stream("h264", rate=24)
        stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
        for frame in make_clip(frames=3).frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    with pytest.raises(ValueError, match="needs a video and an audio stream, it has: video"):
        read_clip(tmp_path / "mute.mp4")


def test_file_that_is_no_media_is_refused(tmp_path: Path) -> None:
    (tmp_path / "error.mp4").write_text('{"error": "out of memory"}')
    with pytest.raises(ValueError, match="no media file"):
        read_clip(tmp_path / "error.mp4")


def test_truncated_clip_is_refused(tmp_path: Path) -> None:
    write_clip(tmp_path / "clip.mp4", make_clip())
    whole = (tmp_path / "clip.mp4").read_bytes()
    (tmp_path / "clip.mp4").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="no media file"):
        read_clip(tmp_path / "clip.mp4")


def test_what_an_mp4_cannot_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="even sides, got 47x32"):
        write_clip(tmp_path / "odd.mp4", make_clip(width=47))
    with pytest.raises(ValueError, match="1 or 2 audio channels, got 3"):
        write_clip(tmp_path / "surround.mp4", make_clip(channels=3))
    assert not list(tmp_path.iterdir())
