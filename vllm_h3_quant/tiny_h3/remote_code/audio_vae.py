"""A stand-in for the MiniMax-H3 audio VAE: the interface that vLLM-Omni uses, and a bank of tones behind it."""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

LATENT_CHANNELS = 32
SAMPLES_PER_LATENT = 800
SAMPLE_RATE = 32000
TONES = 16


class ToneBank(nn.Module):
    """Envelopes ``(B, 16, T)`` to a waveform ``(B, 1, 800 T)``: ``sum_i envelope_i(t) sin(2 pi (f_i t + p_i))``.

    Tones keep their energy in few bands, so that an audio codec keeps what the model made.
    """

    def __init__(self) -> None:
        super().__init__()
        self.frequency = nn.Parameter(torch.empty(TONES))
        self.phase = nn.Parameter(torch.empty(TONES))

    def forward(self, envelope: torch.Tensor) -> torch.Tensor:
        samples = envelope.shape[-1] * SAMPLES_PER_LATENT
        loudness = functional.interpolate(envelope, size=samples, mode="linear", align_corners=False)
        # fp64: a minute of a 2 kHz tone is 120000 turns, beyond what fp32 resolves to a small angle.
        seconds = torch.arange(samples, device=envelope.device, dtype=torch.float64) / SAMPLE_RATE
        turns = self.frequency.double()[:, None] * seconds + self.phase.double()[:, None]
        carrier = torch.sin(2 * math.pi * (turns % 1.0)).to(loudness.dtype)
        return (loudness * carrier).sum(dim=1, keepdim=True)


class DacAudioVAE(nn.Module):
    """Parts under the names that vLLM-Omni looks for."""

    def __init__(self) -> None:
        super().__init__()
        self.attn_proj = False
        self.encoder = nn.Conv1d(1, TONES, SAMPLES_PER_LATENT, stride=SAMPLES_PER_LATENT)
        self.pre_block = nn.Identity()
        self.mean_proj = nn.Conv1d(TONES, LATENT_CHANNELS, 1)
        self.dec_in_proj = nn.Conv1d(LATENT_CHANNELS, TONES, 1)
        self.decoder = ToneBank()

    def preprocess(self, waveform: torch.Tensor, sample_rate: int) -> torch.Tensor:
        """Drop the samples after the last whole latent."""
        return waveform[..., : waveform.shape[-1] // SAMPLES_PER_LATENT * SAMPLES_PER_LATENT]


class MiniMaxH3AudioVAEModel(nn.Module):
    """The class that ``auto_map`` names."""

    def __init__(self, model: DacAudioVAE) -> None:
        super().__init__()
        self.model = model

    def decode(self, latent: torch.Tensor) -> torch.Tensor:
        """Latents ``(B, 32, T)`` to a waveform ``(B, 1, 800 T)`` in (-1, 1)."""
        return torch.tanh(self.model.decoder(self.model.dec_in_proj(latent)))

    @classmethod
    def from_pretrained(cls, path: str) -> "MiniMaxH3AudioVAEModel":
        """Build from a component folder."""
        folder = Path(path)
        config = json.loads((folder / "config.json").read_text())
        model = DacAudioVAE()
        model.load_state_dict(load_file(folder / config["source_safetensors_path"]), strict=True)
        return cls(model)
