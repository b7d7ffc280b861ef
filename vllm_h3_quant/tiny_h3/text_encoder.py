"""The tiny Qwen3-VL text encoder: a decoder of the width that the DiT expects, and a two-block vision tower."""

from __future__ import annotations

from typing import Any

import torch

from vllm_h3_quant.tiny_h3.spec import TEXT_DIM, TinyH3
from vllm_h3_quant.tiny_h3.tensors import RandomTensors
from vllm_h3_quant.tiny_h3.tokenizer import SPECIAL_TOKEN_IDS, VOCAB_SIZE

_HEADS, _KV_HEADS, _HEAD_DIM, _FFN = 4, 2, 64, 256
_VISION_WIDTH, _VISION_DEPTH, _VISION_HEADS, _VISION_FFN = 64, 2, 4, 128
_VISION_PATCH, _VISION_MERGE, _VISION_POSITIONS = 16, 2, 64
_DEEPSTACK_LAYERS = (0,)
_SMALL_STD = 0.02


def text_encoder_config(spec: TinyH3) -> dict[str, Any]:
    """``text_encoder/config.json`` of ``Qwen3VLForConditionalGeneration`` (transformers' ``Qwen3VLConfig``)."""
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "image_token_id": SPECIAL_TOKEN_IDS["<|image_pad|>"],
        "video_token_id": SPECIAL_TOKEN_IDS["<|video_pad|>"],
        "vision_start_token_id": SPECIAL_TOKEN_IDS["<|vision_start|>"],
        "vision_end_token_id": SPECIAL_TOKEN_IDS["<|vision_end|>"],
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "qwen3_vl_text",
            "hidden_size": TEXT_DIM,
            "num_hidden_layers": spec.encoder_layers,
            "num_attention_heads": _HEADS,
            "num_key_value_heads": _KV_HEADS,
            "head_dim": _HEAD_DIM,
            "intermediate_size": _FFN,
            "vocab_size": VOCAB_SIZE,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "max_position_embeddings": 4096,
            "attention_bias": False,
            "dtype": "bfloat16",
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5000000.0,
                "mrope_section": [12, 10, 10],
                "mrope_interleaved": True,
            },
        },
        "vision_config": {
            "model_type": "qwen3_vl",
            "depth": _VISION_DEPTH,
            "hidden_size": _VISION_WIDTH,
            "num_heads": _VISION_HEADS,
            "intermediate_size": _VISION_FFN,
            "patch_size": _VISION_PATCH,
            "temporal_patch_size": 2,
            "spatial_merge_size": _VISION_MERGE,
            "in_channels": 3,
            "out_hidden_size": TEXT_DIM,
            "num_position_embeddings": _VISION_POSITIONS,
            "deepstack_visual_indexes": list(_DEEPSTACK_LAYERS),
            "hidden_act": "gelu_pytorch_tanh",
        },
    }


def text_encoder_state(spec: TinyH3, random: RandomTensors) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint in bf16, projections unfused as Hugging Face stores them."""
    language = "model.language_model"
    state = {
        "lm_head.weight": random.normal(VOCAB_SIZE, TEXT_DIM),
        f"{language}.embed_tokens.weight": random.normal(VOCAB_SIZE, TEXT_DIM, std=1.0),
        f"{language}.norm.weight": _ones(TEXT_DIM),
    }
    for index in range(spec.encoder_layers):
        state |= _decoder_layer(f"{language}.layers.{index}", random)
    return state | _vision_tower("model.visual", random)


def _decoder_layer(prefix: str, random: RandomTensors) -> dict[str, torch.Tensor]:
    return {
        f"{prefix}.self_attn.q_proj.weight": random.normal(_HEADS * _HEAD_DIM, TEXT_DIM),
        f"{prefix}.self_attn.k_proj.weight": random.normal(_KV_HEADS * _HEAD_DIM, TEXT_DIM),
        f"{prefix}.self_attn.v_proj.weight": random.normal(_KV_HEADS * _HEAD_DIM, TEXT_DIM),
        f"{prefix}.self_attn.o_proj.weight": random.normal(TEXT_DIM, _HEADS * _HEAD_DIM),
        f"{prefix}.self_attn.q_norm.weight": _ones(_HEAD_DIM),
        f"{prefix}.self_attn.k_norm.weight": _ones(_HEAD_DIM),
        f"{prefix}.mlp.gate_proj.weight": random.normal(_FFN, TEXT_DIM),
        f"{prefix}.mlp.up_proj.weight": random.normal(_FFN, TEXT_DIM),
        f"{prefix}.mlp.down_proj.weight": random.normal(TEXT_DIM, _FFN),
        f"{prefix}.input_layernorm.weight": _ones(TEXT_DIM),
        f"{prefix}.post_attention_layernorm.weight": _ones(TEXT_DIM),
    }


def _vision_tower(prefix: str, random: RandomTensors) -> dict[str, torch.Tensor]:
    patch = (3, 2, _VISION_PATCH, _VISION_PATCH)
    state = {
        f"{prefix}.patch_embed.proj.weight": random.normal(_VISION_WIDTH, *patch, std=_SMALL_STD),
        f"{prefix}.patch_embed.proj.bias": random.normal(_VISION_WIDTH, std=_SMALL_STD),
        f"{prefix}.pos_embed.weight": random.normal(_VISION_POSITIONS, _VISION_WIDTH, std=_SMALL_STD),
    }
    for index in range(_VISION_DEPTH):
        block = f"{prefix}.blocks.{index}"
        state |= _layer_norm(f"{block}.norm1", _VISION_WIDTH) | _layer_norm(f"{block}.norm2", _VISION_WIDTH)
        state |= _linear(f"{block}.attn.qkv", 3 * _VISION_WIDTH, _VISION_WIDTH, random)
        state |= _linear(f"{block}.attn.proj", _VISION_WIDTH, _VISION_WIDTH, random)
        state |= _linear(f"{block}.mlp.linear_fc1", _VISION_FFN, _VISION_WIDTH, random)
        state |= _linear(f"{block}.mlp.linear_fc2", _VISION_WIDTH, _VISION_FFN, random)
    merged = _VISION_WIDTH * _VISION_MERGE**2
    mergers = [(f"{prefix}.merger", _VISION_WIDTH)]
    mergers += [(f"{prefix}.deepstack_merger_list.{i}", merged) for i in range(len(_DEEPSTACK_LAYERS))]
    for merger, normed in mergers:
        state |= _layer_norm(f"{merger}.norm", normed)
        state |= _linear(f"{merger}.linear_fc1", merged, merged, random)
        state |= _linear(f"{merger}.linear_fc2", TEXT_DIM, merged, random)
    return state


def _linear(name: str, out_features: int, in_features: int, random: RandomTensors) -> dict[str, torch.Tensor]:
    return {
        f"{name}.weight": random.normal(out_features, in_features),
        f"{name}.bias": random.normal(out_features, std=_SMALL_STD),
    }


def _layer_norm(name: str, size: int) -> dict[str, torch.Tensor]:
    return {f"{name}.weight": _ones(size), f"{name}.bias": torch.zeros(size, dtype=torch.bfloat16)}


def _ones(size: int) -> torch.Tensor:
    return torch.ones(size, dtype=torch.bfloat16)
