"""An MP4 as arrays, and arrays as an MP4."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray

_CRF = "18"  # as vLLM-Omni encodes its clips


@dataclass(frozen=True, eq=False)
class Clip:
    """A decoded video with its sound.

    Attributes:
        frames: uint8 RGB ``(F, H, W, 3)``.
        fps: average frames per second.
        audio: fp32 ``(channels, samples)``, full scale at 1.
        sample_rate: samples per second and channel.
        video_codec: name of the codec as FFmpeg spells it, such as ``h264``.
        audio_codec: likewise, such as ``aac``.
    """

    frames: NDArray[np.uint8]
    fps: float
    audio: NDArray[np.float32]
    sample_rate: int
    video_codec: str = "h264"
    audio_codec: str = "aac"

    @property
    def video_seconds(self) -> float:
        """Frames over frames per second."""
        return len(self.frames) / self.fps

    @property
    def audio_seconds(self) -> float:
        """Samples over the sample rate."""
        return self.audio.shape[1] / self.sample_rate


def read_clip(path: Path) -> Clip:
    """Decode the first video and the first audio stream of ``path``.

    Raises:
        ValueError: no media file, a stream is missing, or a stream holds nothing.
        OSError: the file cannot be read.
    """
    try:
        with av.open(str(path)) as container:
            if not container.streams.video or not container.streams.audio:
                kinds = ", ".join(stream.type for stream in container.streams) or "none"
                raise ValueError(f"{path} needs a video and an audio stream, it has: {kinds}")
            video, sound = container.streams.video[0], container.streams.audio[0]
            frames: list[NDArray[np.uint8]] = []
            resampler = av.AudioResampler(format="fltp", layout=sound.layout, rate=sound.rate)
            blocks: list[NDArray[np.float32]] = []
            for frame in container.decode(video, sound):
                if isinstance(frame, av.VideoFrame):
                    frames.append(frame.to_ndarray(format="rgb24").astype(np.uint8, copy=False))
                elif isinstance(frame, av.AudioFrame):
                    blocks += [b.to_ndarray().astype(np.float32, copy=False) for b in resampler.resample(frame)]
            fps, sample_rate = float(video.average_rate or 0), sound.rate
            codecs = (video.codec_context.name, sound.codec_context.name)
    except av.error.InvalidDataError as error:
        raise ValueError(f"{path} is no media file that FFmpeg can read ({error.strerror})") from error
    if not frames or not blocks or not fps:
        raise ValueError(f"{path} holds {len(frames)} frames at {fps} fps and {len(blocks)} audio blocks")
    return Clip(
        frames=np.stack(frames),
        fps=fps,
        audio=np.concatenate(blocks, axis=1),
        sample_rate=sample_rate,
        video_codec=codecs[0],
        audio_codec=codecs[1],
    )


def write_clip(path: Path, clip: Clip) -> None:
    """Encode ``clip`` into an MP4 of H.264 (``yuv420p``) and AAC, whatever its codecs were.

    Raises:
        ValueError: sides that are odd (``yuv420p`` halves both), or audio of other than one or two channels.
    """
    height, width = clip.frames.shape[1:3]
    channels = len(clip.audio)
    if height % 2 or width % 2:
        raise ValueError(f"an MP4 needs even sides, got {width}x{height}")
    if channels not in (1, 2):
        raise ValueError(f"an MP4 is written with 1 or 2 audio channels, got {channels}")
    rate = Fraction(clip.fps).limit_denominator(1001)
    with av.open(str(path), "w", format="mp4") as container:
        video = container.add_stream("h264", rate=rate, options={"crf": _CRF})
        video.width, video.height, video.pix_fmt = width, height, "yuv420p"
        sound = container.add_stream("aac", rate=clip.sample_rate)
        sound.layout = "mono" if channels == 1 else "stereo"
        for pixels in clip.frames:
            container.mux(video.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(video.encode())
        block = av.AudioFrame.from_ndarray(
            np.ascontiguousarray(clip.audio, dtype=np.float32), format="fltp", layout=sound.layout.name
        )
        block.sample_rate = clip.sample_rate
        # With a start time the muxer hides the encoder's delay of one AAC block; without, it plays as silence.
        block.pts, block.time_base = 0, Fraction(1, clip.sample_rate)
        container.mux(sound.encode(block))
        container.mux(sound.encode())
