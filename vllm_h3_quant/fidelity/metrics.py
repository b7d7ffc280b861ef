"""Distances between a clip or tensor and its reference. All of them refuse shapes that differ."""

from __future__ import annotations

import math

import torch

_PEAK = 255.0
_FRAMES_PER_CHUNK = 16


def psnr_db(frames: torch.Tensor, reference: torch.Tensor) -> float:
    """Peak signal-to-noise ratio in dB: ``10 log10(255^2 / MSE)`` over all frames, pixels and colours at once.

    Args:
        frames: uint8 ``(F, H, W, 3)``.
        reference: uint8 of the same shape.

    Returns:
        ``inf`` where both are identical.

    Raises:
        ValueError: the shapes differ, a tensor is not uint8, or there is nothing to compare.
    """
    _require_same_shape("frames", frames, reference)
    for name, tensor in (("frames", frames), ("reference", reference)):
        if tensor.dtype != torch.uint8:
            raise ValueError(f"PSNR takes uint8 {name}, got {tensor.dtype}")
    # In chunks: fp32 copies of a 15 s clip at full size are 9 GB.
    squared_error = 0.0
    for part, wanted in zip(frames.split(_FRAMES_PER_CHUNK), reference.split(_FRAMES_PER_CHUNK), strict=True):
        squared_error += float((part.double() - wanted.double()).square().sum())
    mse = squared_error / frames.numel()
    return math.inf if mse == 0 else 10 * math.log10(_PEAK**2 / mse)


def snr_db(audio: torch.Tensor, reference: torch.Tensor) -> float:
    """Signal-to-noise ratio in dB: ``10 log10(sum r^2 / sum (a - r)^2)`` over all channels at once.

    Args:
        audio: floating point ``(channels, samples)``.
        reference: of the same shape; not silent.

    Returns:
        ``inf`` where both are identical.

    Raises:
        ValueError: the shapes differ, there is nothing to compare, or the reference is silent.
    """
    _require_same_shape("audio", audio, reference)
    if not torch.any(reference):
        raise ValueError("SNR has no meaning against a silent reference")
    if torch.equal(audio, reference):
        return math.inf
    wanted = reference.double()
    ratio = wanted.square().sum() / (audio.double() - wanted).square().sum()
    return float(10 * ratio.log10())


def describe_db(value: float) -> str:
    """``"38.2 dB"``, or ``"identical"`` for infinity."""
    return "identical" if value == math.inf else f"{value:.1f} dB"


def _require_same_shape(name: str, values: torch.Tensor, reference: torch.Tensor) -> None:
    if values.shape != reference.shape:
        raise ValueError(f"{name} {tuple(values.shape)} and reference {tuple(reference.shape)} differ in shape")
    if not values.numel():
        raise ValueError(f"{name} {tuple(values.shape)} are empty: nothing to compare")
