"""Checkpoint names of MiniMax-H3 and the linears they stand for in the model.

=====================  =============================================  ==========================================
naming                 example                                        where
=====================  =============================================  ==========================================
native                 ``blocks.0.attn.qkv_proj.weight``              MiniMax's release, ComfyUI, our export
prefixed               ``model.diffusion_model.blocks.0...``          ComfyUI's single files
Diffusers              ``transformer_blocks.0.attn.to_q.weight``      Diffusers, ModelOpt exports of it
Qwen3-VL               ``model.language_model.layers.0...q_proj...``  the text encoder
=====================  =============================================  ==========================================
"""

from __future__ import annotations

import re
from dataclasses import dataclass

PREFIXES = ("model.diffusion_model.", "diffusion_model.")
"""What ComfyUI writes before the DiT's names."""

CURVE = "adaln_t_table"
"""The curve of a pruned checkpoint: AdaLN inputs over a grid of timesteps, which replace the time embedder."""

WEIGHT, BIAS = "weight", "bias"
SCALE, GLOBAL_SCALE, INPUT_SCALE, MARKER = "weight_scale", "weight_scale_2", "input_scale", "comfy_quant"

_LEAVES = {
    "weight": WEIGHT,
    "bias": BIAS,
    "weight_scale": SCALE,
    "scale_weight": SCALE,
    "weight_scale_inv": SCALE,
    "weight_scale_2": GLOBAL_SCALE,
    "input_scale": INPUT_SCALE,
    "scale_input": INPUT_SCALE,
    "comfy_quant": MARKER,
}
"""Last parts of names that belong to a linear, and what each is."""

LOOSE = frozenset({"scaled_fp8"})
"""Tensors that carry no value: a marker of older ComfyUI files."""

_TOP = {
    "proj_in": "video_patch_proj",
    "proj_out": "final_layer.video_out",
    "audio_proj_in": "audio_patch_proj",
    "audio_proj_out": "final_layer.audio_out",
    "context_embedder": "condition_proj",
    "time_embedder.linear_1": "time_embedder.proj_in",
    "time_embedder.linear_2": "time_embedder.proj_out",
    "norm_out.linear": "final_layer.adaln_proj.linear",
    "norm_out.norm": "final_layer.norm",
    "token_refiner.final_norm": "token_refiner.final_norm",
}
_IN_BLOCK = {
    "attn.to_q": ("attn.qkv_proj", "q"),
    "attn.to_k": ("attn.qkv_proj", "k"),
    "attn.to_v": ("attn.qkv_proj", "v"),
    "attn.to_out.0": ("attn.out_proj", ""),
    "attn.to_gate_compress": ("attn.to_gate_compress", ""),
    "attn.norm_q": ("attn.q_norm", ""),
    "attn.norm_k": ("attn.k_norm", ""),
    "ff.net.0.proj": ("mlp.fc1", "swapped"),
    "ff.net.2": ("mlp.fc2", ""),
    "adaln_proj.linear": ("adaln_proj.linear", ""),
    "norm1": ("norm1", ""),
    "norm2": ("norm2", ""),
}
_BLOCK = re.compile(r"(token_refiner\.refiner_blocks|transformer_blocks)\.(\d+)\.(.+)")
_BLOCKS = {"token_refiner.refiner_blocks": "token_refiner.blocks", "transformer_blocks": "blocks"}

_ENCODER_LAYER = re.compile(r"model\.language_model\.(layers\.(\d{1,4})\.(?:self_attn|mlp))\.(\w+)", re.ASCII)
_ENCODER_LINEARS = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "qkv_proj": ("qkv_proj", ""),
    "o_proj": ("o_proj", ""),
    "gate_proj": ("gate_up_proj", "gate"),
    "up_proj": ("gate_up_proj", "up"),
    "gate_up_proj": ("gate_up_proj", ""),
    "down_proj": ("down_proj", ""),
}


@dataclass(frozen=True)
class Target:
    """Where a checkpoint's module goes.

    Attributes:
        module: the model's module.
        part: which of its rows: empty for all, ``q``, ``k``, ``v``, ``gate``, ``up``, or ``swapped`` for
            ``[up; gate]`` where the model keeps ``[gate; up]``.
    """

    module: str
    part: str = ""


def split(name: str) -> tuple[str, str]:
    """The module and the kind of leaf of a tensor; an empty kind for one that belongs to no linear or norm."""
    module, _, leaf = name.rpartition(".")
    return module, _LEAVES.get(leaf, "") if module else ""


def without_prefix(name: str) -> str:
    """``name`` without what ComfyUI writes before it."""
    for prefix in PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def is_diffusers(name: str) -> bool:
    """Whether a name exists in the Diffusers naming alone."""
    return _BLOCK.match(name) is not None


def diffusers_target(module: str) -> Target | None:
    """The target of a Diffusers module; None where the model has none."""
    if module in _TOP:
        return Target(_TOP[module])
    found = _BLOCK.fullmatch(module)
    if found is None or found[3] not in _IN_BLOCK:
        return None
    native, part = _IN_BLOCK[found[3]]
    return Target(f"{_BLOCKS[found[1]]}.{found[2]}.{native}", part)


def encoder_target(module: str) -> Target | None:
    """The target of one of the text decoder's linears; None for every other module."""
    found = _ENCODER_LAYER.fullmatch(module)
    if found is None or found[3] not in _ENCODER_LINEARS:
        return None
    fused, part = _ENCODER_LINEARS[found[3]]
    return Target(f"text_model.{found[1]}.{fused}", part)


def encoder_layer(name: str) -> int | None:
    """The text decoder's layer that a tensor belongs to; None outside of them."""
    found = re.match(r"model\.language_model\.layers\.(\d{1,4})\.", name, re.ASCII)
    return int(found[1]) if found else None
