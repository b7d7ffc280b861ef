"""A synthetic clip: moving gradients and two tones, different in each channel."""

from __future__ import annotations

import numpy as np

from vllm_h3_quant.fidelity.clip import Clip


def make_clip(
    *, frames: int = 22, height: int = 32, width: int = 48, fps: float = 24.0, rate: int = 32000, channels: int = 2
) -> Clip:
    """A clip whose sound is as long as its pictures."""
    time, row, column = np.ogrid[:frames, :height, :width]
    red = 255 * column / width + 0 * (row + time)
    green = 255 * row / height + 0 * (column + time)
    blue = 127 + 120 * np.sin(time / 6) + 0 * (row + column)
    seconds = np.arange(round(frames / fps * rate)) / rate
    tones = [0.4 * np.sin(2 * np.pi * (220 + 110 * channel) * seconds) for channel in range(channels)]
    picture = np.stack([red, green, blue], axis=-1)
    return Clip(picture.astype(np.uint8), fps, np.stack(tones).astype(np.float32), rate)
