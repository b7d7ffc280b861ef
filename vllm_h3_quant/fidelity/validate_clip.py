"""Check that an MP4 is what a MiniMax-H3 request should return.

``python -m vllm_h3_quant.fidelity.validate_clip FILE --frames 124 --fps 24`` prints one line a check and exits
with 1 if any failed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_h3_quant.fidelity.clip import Clip, read_clip

_SAMPLE_RATE = 32000
_CHANNELS = 2

# Sound ends within one audio latent (25 ms) of the last frame; AAC pads to whole blocks of 1024 samples (32 ms).
_DURATION_TOLERANCE_S = 0.1


@dataclass(frozen=True)
class Check:
    """One property of a clip: what was wanted and what was found."""

    name: str
    wanted: str
    found: str
    passed: bool

    def __str__(self) -> str:
        verdict = "ok" if self.passed else "FAILED"
        return f"{verdict:6} {self.name}: {self.found} (wanted {self.wanted})"


def aligned_frames(requested: int) -> int:
    """The frames that H3 returns for ``requested``: the smallest ``17 n + 5`` that is not below it.

    The video VAE decodes ``5 n + 2`` latent steps, and the pipeline rounds a request up to them (96 -> 107).
    """
    return 17 * max(0, -(-(requested - 5) // 17)) + 5


def check_clip(
    clip: Clip, *, frames: int, fps: float, width: int | None = None, height: int | None = None
) -> list[Check]:
    """Compare a clip with the request that made it.

    Args:
        clip: what came back.
        frames: frames that were asked for; :func:`aligned_frames` of them are wanted.
        fps: frames per second that were asked for.
        width: pixels asked for, None for any.
        height: pixels asked for, None for any.
    """
    drift = abs(clip.video_seconds - clip.audio_seconds)
    checks = [
        _equal("video codec", "h264", clip.video_codec),
        _equal("audio codec", "aac", clip.audio_codec),
        _equal("frames", aligned_frames(frames), len(clip.frames)),
        _equal("fps", f"{fps:g}", f"{clip.fps:g}"),
        _equal("audio rate", _SAMPLE_RATE, clip.sample_rate),
        _equal("audio channels", _CHANNELS, len(clip.audio)),
        Check(
            "duration",
            f"video and audio within {_DURATION_TOLERANCE_S:g} s",
            f"video {clip.video_seconds:.3f} s, audio {clip.audio_seconds:.3f} s",
            drift <= _DURATION_TOLERANCE_S,
        ),
    ]
    if width is not None:
        checks.append(_equal("width", width, clip.frames.shape[2]))
    if height is not None:
        checks.append(_equal("height", height, clip.frames.shape[1]))
    return checks


def _equal(name: str, wanted: object, found: object) -> Check:
    return Check(name, str(wanted), str(found), wanted == found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("file", type=Path)
    parser.add_argument("--frames", type=int, required=True, help="frames that were asked for")
    parser.add_argument("--fps", type=float, required=True)
    parser.add_argument("--width", type=int)
    parser.add_argument("--height", type=int)
    options = parser.parse_args(arguments)
    try:
        clip = read_clip(options.file)
    except (OSError, ValueError) as error:
        print(f"validate_clip: {error}", file=sys.stderr)
        return 1
    checks = check_clip(clip, frames=options.frames, fps=options.fps, width=options.width, height=options.height)
    for check in checks:
        print(check)
    return 0 if all(check.passed for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
