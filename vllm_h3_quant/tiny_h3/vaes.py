"""The stand-in VAEs: remote code shipped with the checkpoint, as MiniMax-H3 ships its own, and their weights."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import torch
from safetensors.torch import save_file

from vllm_h3_quant.tiny_h3 import remote_code
from vllm_h3_quant.tiny_h3.spec import (
    AUDIO_LATENT_CHANNELS,
    AUDIO_SAMPLE_RATE,
    AUDIO_SAMPLES_PER_LATENT,
    VIDEO_LATENT_CHANNELS,
    VIDEO_PIXELS_PER_LATENT,
)
from vllm_h3_quant.tiny_h3.tensors import RandomTensors

_FP32 = torch.float32
_TONES = 16
_LOWEST_TONE_HZ, _TONE_OCTAVES = 110.0, 4.0

# Final latents have a standard deviation of about 1.5. These bring pixels to about 0.4 of [-1, 1] and a
# waveform to about 0.3, so that few values reach the limits, where an error would be clipped away.
_PIXEL_GAIN = 0.45
_AUDIO_GAIN = 0.08


def write_video_vae(folder: Path, random: RandomTensors) -> None:
    """Write ``video_vae/``: config, remote code and fp32 weights of ``TinyVideoAE``."""
    channels, pixels = VIDEO_LATENT_CHANNELS, VIDEO_PIXELS_PER_LATENT
    source = folder / "source"
    source.mkdir(parents=True)
    _copy_code("video_vae", folder / "modeling_minimax_h3_video_vae.py")
    _copy_code("parallel", folder / "parallel.py")
    config = {
        "model_type": "minimax_h3_video_vae",
        "auto_map": {"AutoModel": "modeling_minimax_h3_video_vae.MiniMaxH3VideoVAEModel"},
        "latent_channels": channels,
        "latents_mean": [0.0] * channels,
        "latents_std": [1.0] * channels,
        "source_class_name": "TinyVideoAE",
        "source_path": source.name,
        "source_safetensors_path": "diffusion_pytorch_model.safetensors",
        "vae_clip_length": 17,
        "vae_token_drop": 0,
        "vae_encoder_tiling": 0,
        "vae_decoder_tiling": 0,
        "vae_parallel_tiling": 0,
        "vae_tile_size": 256,
        "vae_tile_overlap_min": 64,
        "vae_encoder_parallel": 0,
        "vae_decoder_parallel": 0,
        "vae_chunk_dim": 2,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    gain = channels**-0.5
    weights = {
        "encoder.weight": random.normal(channels, 3, pixels, pixels, std=0.05, dtype=_FP32),
        "encoder.bias": torch.zeros(channels),
        "quant_conv.weight": random.normal(channels, channels, 1, 1, std=gain, dtype=_FP32),
        "quant_conv.bias": torch.zeros(channels),
        "post_quant_conv.weight": random.normal(channels, channels, 1, 1, 1, std=gain, dtype=_FP32),
        "post_quant_conv.bias": torch.zeros(channels),
        "decoder.weight": random.normal(3, channels, 1, 1, 1, std=_PIXEL_GAIN * gain, dtype=_FP32),
        "decoder.bias": torch.zeros(3),
    }
    save_file(weights, source / "diffusion_pytorch_model.safetensors")


def write_audio_vae(folder: Path, random: RandomTensors) -> None:
    """Write ``audio_vae/``: config, remote code and fp32 weights of ``DacAudioVAE``."""
    channels, samples = AUDIO_LATENT_CHANNELS, AUDIO_SAMPLES_PER_LATENT
    folder.mkdir(parents=True)
    _copy_code("audio_vae", folder / "modeling_minimax_h3_audio_vae.py")
    config = {
        "model_type": "minimax_h3_audio_vae",
        "auto_map": {"AutoModel": "modeling_minimax_h3_audio_vae.MiniMaxH3AudioVAEModel"},
        "latent_channels": channels,
        "latents_mean": [0.0] * channels,
        "latents_std": [1.0] * channels,
        "sample_rate": AUDIO_SAMPLE_RATE,
        "source_safetensors_path": "model.safetensors",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    weights = {
        "encoder.weight": random.normal(_TONES, 1, samples, dtype=_FP32),
        "encoder.bias": torch.zeros(_TONES),
        "mean_proj.weight": random.normal(channels, _TONES, 1, std=_TONES**-0.5, dtype=_FP32),
        "mean_proj.bias": torch.zeros(channels),
        "dec_in_proj.weight": random.normal(_TONES, channels, 1, std=_AUDIO_GAIN * channels**-0.5, dtype=_FP32),
        "dec_in_proj.bias": torch.zeros(_TONES),
        "decoder.frequency": _LOWEST_TONE_HZ * 2 ** random.uniform(0.0, _TONE_OCTAVES, _TONES),
        "decoder.phase": random.uniform(0.0, 1.0, _TONES),
    }
    save_file(weights, folder / "model.safetensors")


def _copy_code(module: str, target: Path) -> None:
    target.write_text(resources.files(remote_code).joinpath(f"{module}.py").read_text(encoding="utf-8"))
