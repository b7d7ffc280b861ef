"""Each fault of a clip fails its own check, and the command's exit status says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from clips import make_clip

from vllm_h3_quant.fidelity.clip import Clip, write_clip
from vllm_h3_quant.fidelity.validate_clip import aligned_frames, check_clip, main


@pytest.mark.parametrize(("requested", "frames"), [(1, 5), (5, 5), (6, 22), (96, 107), (107, 107), (124, 124)])
def test_frames_round_up_to_17n_plus_5(requested: int, frames: int) -> None:
    assert aligned_frames(requested) == frames


def failed(clip: Clip) -> list[str]:
    checks = check_clip(clip, frames=20, fps=24, width=48, height=32)
    return [check.name for check in checks if not check.passed]


def test_clip_as_requested_passes() -> None:
    assert failed(make_clip()) == []


@pytest.mark.parametrize(
    ("clip", "names"),
    [
        (make_clip(frames=20), ["frames"]),
        (make_clip(width=64), ["width"]),
        (make_clip(height=64), ["height"]),
        (make_clip(rate=48000), ["audio rate"]),
        (make_clip(channels=1), ["audio channels"]),
        (replace(make_clip(), video_codec="hevc"), ["video codec"]),
        (replace(make_clip(), audio_codec="mp3"), ["audio codec"]),
        (replace(make_clip(), audio=make_clip().audio[:, :-6400]), ["duration"]),
        (make_clip(fps=25.0), ["fps"]),
    ],
)
def test_each_fault_fails_its_own_check(clip: Clip, names: list[str]) -> None:
    assert failed(clip) == names


def test_size_is_checked_only_where_it_is_given() -> None:
    names = [check.name for check in check_clip(make_clip(), frames=22, fps=24)]
    assert "width" not in names
    assert "height" not in names


def test_command_reports_every_check_and_its_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_clip(tmp_path / "clip.mp4", make_clip())
    assert main([str(tmp_path / "clip.mp4"), "--frames", "22", "--fps", "24"]) == 0
    assert "FAILED" not in capsys.readouterr().out
    assert main([str(tmp_path / "clip.mp4"), "--frames", "40", "--fps", "24"]) == 1
    failures = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAILED")]
    assert failures == ["FAILED frames: 22 (wanted 56)"]


def test_command_names_a_file_it_cannot_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "absent.mp4"), "--frames", "22", "--fps", "24"]) == 1
    error = capsys.readouterr().err
    assert "absent.mp4" in error
    assert error.count("\n") == 1
