"""A stand-in for the MiniMax-H3 video VAE: the interface that vLLM-Omni uses, and a linear codec behind it."""

import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

from .parallel import get_parallel_state

LATENT_CHANNELS = 24
PIXELS_PER_LATENT = 16


class _FromSignedUnit:
    """The constants with which vLLM-Omni maps decoded pixels in [-1, 1] to [0, 1]: ``(x - mean) / std``."""

    mean = (-1.0, -1.0, -1.0)
    std = (2.0, 2.0, 2.0)


class _Processor:
    use_3d_conv = True
    transform_rev = _FromSignedUnit()


def frames_of_latents(latents: int) -> int:
    """Frames of ``latents`` latent steps: 1 for 1, else ``17n + 5`` for ``5n + 2``."""
    return 1 if latents == 1 else 17 * ((latents - 2) // 5) + 5


class TinyVideoAE(nn.Module):
    """Latents ``(B, 24, T, h, w)`` to pixels ``(B, 3, F, 16h, 16w)``: two 1x1 maps, then linear interpolation.

    Interpolation makes neighbouring pixels and frames alike, so that a video codec keeps what the model made.
    """

    def __init__(self, clip_length: int) -> None:
        super().__init__()
        self.vae_ratio = PIXELS_PER_LATENT
        self.clip_length = clip_length
        self.parallel_tiling = False
        self.processor = _Processor()
        self.encoder = nn.Conv2d(3, LATENT_CHANNELS, PIXELS_PER_LATENT, stride=PIXELS_PER_LATENT)
        self.quant_conv = nn.Conv2d(LATENT_CHANNELS, LATENT_CHANNELS, 1)
        self.post_quant_conv = nn.Conv3d(LATENT_CHANNELS, LATENT_CHANNELS, 1)
        self.decoder = nn.Conv3d(LATENT_CHANNELS, 3, 1)

    def split_tiles(self, size: int, is_decoder: bool) -> tuple[list[int], int, int]:
        """One tile: (starts, tile size, overlap)."""
        return [0], size, 0

    def encode_images(self, image: Image.Image, use_fp16_latent: bool = True) -> list[torch.Tensor]:
        """One latent ``(24, 1, h, w)`` of an RGB image whose sides are multiples of 16."""
        pixels = torch.from_numpy(np.array(image.convert("RGB"))).to(self.encoder.weight)
        latent = self.quant_conv(self.encoder(pixels.permute(2, 0, 1)[None] / 127.5 - 1.0))
        return [latent.transpose(0, 1).half() if use_fp16_latent else latent.transpose(0, 1)]

    def decode_base(self, latent: torch.Tensor) -> torch.Tensor:
        """Latents ``(B, 24, T, h, w)`` to fp32 pixels ``(B, 3, F, 16h, 16w)``, nominally in [-1, 1]."""
        _, _, steps, height, width = latent.shape
        size = (frames_of_latents(steps), height * PIXELS_PER_LATENT, width * PIXELS_PER_LATENT)
        colours = self.decoder(self.post_quant_conv(latent)).float()
        return functional.interpolate(colours, size=size, mode="trilinear", align_corners=False)


class MiniMaxH3VideoVAEModel(nn.Module):
    """The class that ``auto_map`` names."""

    def __init__(self, model: TinyVideoAE) -> None:
        super().__init__()
        self.model = model

    @classmethod
    def from_pretrained(cls, path: str) -> "MiniMaxH3VideoVAEModel":
        """Build from a component folder."""
        get_parallel_state()
        folder = Path(path)
        config = json.loads((folder / "config.json").read_text())
        model = TinyVideoAE(int(config["vae_clip_length"]))
        weights = folder / config["source_path"] / config["source_safetensors_path"]
        model.load_state_dict(load_file(weights), strict=True)
        return cls(model)
