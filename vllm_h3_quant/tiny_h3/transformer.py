"""The tiny DiT: config and state dict in the native MiniMax-H3 layout."""

from __future__ import annotations

from typing import Any

import torch

from vllm_h3_quant.tiny_h3.spec import (
    AUDIO_LATENT_CHANNELS,
    HEAD_DIM,
    TEXT_DIM,
    VIDEO_LATENT_CHANNELS,
    TinyH3,
)
from vllm_h3_quant.tiny_h3.tensors import RandomTensors

_PATCH_SIZE = (1, 2, 2)
_TIMESTEP_INPUT_DIM = 256
_TIME_HIDDEN = 192
_TIME_EMBED = 128
_ROPE_FREQUENCIES = 16
_ROPE_THETA = 10000.0
_ADALN_OUT = 18  # (shift, scale, gate) of attention and MLP, for each of three modalities
_FINAL_ADALN_OUT = 2
_FP32 = torch.float32

# Of order one, so that a block changes the residual stream as much as it carries, and its error shows.
_ADALN_BIAS_STD = 0.5
_BIAS_STD = 0.02


def transformer_config(spec: TinyH3) -> dict[str, Any]:
    """``transformer/config.json``; the keys of upstream's ``MiniMaxH3DiTArchConfig``."""
    return {
        "num_layers": spec.layers,
        "token_refiner_num_layers": spec.refiner_layers,
        "hidden_size": spec.hidden,
        "num_attention_heads": spec.heads,
        "attention_head_dim": HEAD_DIM,
        "ffn_hidden_size": spec.ffn,
        "latents_dim": VIDEO_LATENT_CHANNELS,
        "audio_latents_dim": AUDIO_LATENT_CHANNELS,
        "patch_size": list(_PATCH_SIZE),
        "text_dim": TEXT_DIM,
        "timestep_input_dim": _TIMESTEP_INPUT_DIM,
        "time_embed_hidden_size": _TIME_HIDDEN,
        "time_embed_dim": _TIME_EMBED,
        "adaln_out_features": _ADALN_OUT * spec.hidden,
        "final_adaln_out_features": _FINAL_ADALN_OUT * spec.hidden,
        "rope_inv_freq_len": _ROPE_FREQUENCIES,
        "norm_eps": 1e-5,
        "qk_norm_eps": 1e-5,
        "final_norm_eps": 1e-5,
    }


def transformer_state(spec: TinyH3, random: RandomTensors) -> dict[str, torch.Tensor]:
    """Every tensor of a native checkpoint: fused ``qkv_proj`` (rows grouped per head) and ``fc1`` ([gate; up]).

    bf16, except the patch projections, the time embedder, the output heads and ``rope.inv_freq``, which
    upstream's ``post_load_weights`` requires in fp32.
    """
    hidden = spec.hidden
    patch = VIDEO_LATENT_CHANNELS * _PATCH_SIZE[0] * _PATCH_SIZE[1] * _PATCH_SIZE[2]
    exponents = torch.arange(_ROPE_FREQUENCIES, dtype=_FP32) / _ROPE_FREQUENCIES
    state: dict[str, torch.Tensor] = {"rope.inv_freq": 1.0 / _ROPE_THETA**exponents}
    state |= _linear("video_patch_proj", hidden, patch, random, dtype=_FP32)
    state |= _linear("audio_patch_proj", hidden, AUDIO_LATENT_CHANNELS, random, dtype=_FP32)
    state |= _linear("condition_proj", hidden, TEXT_DIM, random)
    state |= _linear("time_embedder.proj_in", _TIME_HIDDEN, _TIMESTEP_INPUT_DIM, random, dtype=_FP32)
    state |= _linear("time_embedder.proj_out", _TIME_EMBED, _TIME_HIDDEN, random, dtype=_FP32)
    for index in range(spec.refiner_layers):
        state |= _block(f"token_refiner.blocks.{index}", spec, random)
    state["token_refiner.final_norm.weight"] = _ones(hidden)
    for index in range(spec.layers):
        state |= _block(f"blocks.{index}", spec, random)
        state |= _adaln(f"blocks.{index}.adaln_proj.linear", _ADALN_OUT * hidden, random)
    state["final_layer.norm.weight"] = _ones(hidden)
    state |= _adaln("final_layer.adaln_proj.linear", _FINAL_ADALN_OUT * hidden, random)
    state |= _linear("final_layer.video_out", patch, hidden, random, dtype=_FP32)
    state |= _linear("final_layer.audio_out", AUDIO_LATENT_CHANNELS, hidden, random, dtype=_FP32)
    return state


def _block(prefix: str, spec: TinyH3, random: RandomTensors) -> dict[str, torch.Tensor]:
    attention = spec.heads * HEAD_DIM
    return {
        f"{prefix}.norm1.weight": _ones(spec.hidden),
        f"{prefix}.norm2.weight": _ones(spec.hidden),
        f"{prefix}.attn.qkv_proj.weight": random.normal(3 * attention, spec.hidden),
        f"{prefix}.attn.q_norm.weight": _ones(HEAD_DIM),
        f"{prefix}.attn.k_norm.weight": _ones(HEAD_DIM),
        f"{prefix}.attn.out_proj.weight": random.normal(spec.hidden, attention),
        f"{prefix}.mlp.fc1.weight": random.normal(2 * spec.ffn, spec.hidden),
        f"{prefix}.mlp.fc2.weight": random.normal(spec.hidden, spec.ffn),
    }


def _adaln(name: str, out_features: int, random: RandomTensors) -> dict[str, torch.Tensor]:
    return {
        f"{name}.bias": random.normal(out_features, std=_ADALN_BIAS_STD),
        f"{name}.weight": random.normal(out_features, _TIME_EMBED),
    }


def _linear(
    name: str, out_features: int, in_features: int, random: RandomTensors, dtype: torch.dtype = torch.bfloat16
) -> dict[str, torch.Tensor]:
    return {
        f"{name}.bias": random.normal(out_features, std=_BIAS_STD, dtype=dtype),
        f"{name}.weight": random.normal(out_features, in_features, dtype=dtype),
    }


def _ones(size: int) -> torch.Tensor:
    return torch.ones(size, dtype=torch.bfloat16)
