"""Metrics against values worked out by hand, against torchmetrics, and on what they must refuse."""

from __future__ import annotations

import math

import pytest
import torch

from vllm_h3_quant.fidelity.metrics import describe_db, psnr_db, snr_db


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def pixels(frames: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (frames, 8, 6, 3), generator=generator, dtype=torch.uint8)


def test_psnr_of_a_shift_by_one_is_20_log10_255() -> None:
    reference = pixels(5).clamp(max=254)
    assert psnr_db(reference + 1, reference) == pytest.approx(20 * math.log10(255))


@pytest.mark.parametrize("frames", [1, 16, 37])
def test_psnr_over_chunks_is_the_psnr_of_the_whole(frames: int) -> None:
    """An error that differs between frames tells a mean of MSEs from a mean of decibels."""
    image = pytest.importorskip("torchmetrics.functional.image")
    reference = pixels(frames)
    changed = reference.clone()
    changed[-1] = pixels(1, seed=1)[0]
    whole = image.peak_signal_noise_ratio(changed.double(), reference.double(), data_range=255.0)
    assert psnr_db(changed, reference) == pytest.approx(float(whole))


def test_snr_is_that_of_torchmetrics_over_all_samples() -> None:
    audio = pytest.importorskip("torchmetrics.functional.audio")
    reference = noise(2, 4000) * torch.tensor([[1.0], [0.01]])
    changed = reference + 0.3 * noise(2, 4000, seed=1)
    whole = audio.signal_noise_ratio(changed.double().flatten(), reference.double().flatten())
    assert snr_db(changed, reference) == pytest.approx(float(whole))


def test_snr_of_a_tenth_of_noise_is_20_db_over_channels_of_unequal_loudness() -> None:
    reference = noise(2, 4000) * torch.tensor([[1.0], [0.01]])
    error = noise(2, 4000, seed=1)
    error *= 0.1 * reference.norm() / error.norm()
    assert snr_db(reference + error, reference) == pytest.approx(20.0, abs=1e-3)


def test_identical_inputs_are_called_identical() -> None:
    assert describe_db(psnr_db(pixels(3), pixels(3))) == "identical"
    assert describe_db(snr_db(noise(2, 100), noise(2, 100))) == "identical"
    assert describe_db(38.24) == "38.2 dB"


@pytest.mark.parametrize(
    ("metric", "values", "reference", "message"),
    [
        (psnr_db, pixels(3), pixels(4), r"frames \(3, 8, 6, 3\) and reference \(4, 8, 6, 3\) differ in shape"),
        (psnr_db, pixels(3).float(), pixels(3), "uint8 frames, got torch.float32"),
        (psnr_db, pixels(0), pixels(0), "nothing to compare"),
        (snr_db, noise(2, 9), noise(1, 9), "differ in shape"),
        (snr_db, noise(2, 9), torch.zeros(2, 9), "silent reference"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    metric: object, values: torch.Tensor, reference: torch.Tensor, message: str
) -> None:
    assert callable(metric)
    with pytest.raises(ValueError, match=message) as caught:
        metric(values, reference)
    assert "\n" not in str(caught.value)
