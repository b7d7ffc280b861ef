"""Diffusers' names: q, k and v apart, halves of ``fc1`` the other way around."""

from __future__ import annotations

import re
from dataclasses import dataclass

from vllm_h3_quant.loader.architecture import Architecture
from vllm_h3_quant.loader.formats.base import Format, Layout, Signs, Target

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
    "ff.net.0.proj": ("mlp.fc1", ""),
    "ff.net.2": ("mlp.fc2", ""),
    "adaln_proj.linear": ("adaln_proj.linear", ""),
    "norm1": ("norm1", ""),
    "norm2": ("norm2", ""),
}
_BLOCK = re.compile(r"(token_refiner\.refiner_blocks|transformer_blocks)\.(\d+)\.(.+)")
_BLOCKS = {"token_refiner.refiner_blocks": "token_refiner.blocks", "transformer_blocks": "blocks"}
_SWAPPED = ".mlp.fc1"


@dataclass(frozen=True)
class _Apart(Layout):
    """Names such as ``transformer_blocks.0.attn.to_q.weight``, and ``[up; gate]`` in ``ff.net.0.proj``."""

    fused = False
    named = "Diffusers"

    def has(self, signs: Signs) -> bool:
        return any(_BLOCK.match(name) for name in signs.bare)

    def target(self, module: str) -> Target | None:
        if module in _TOP:
            return Target(_TOP[module])
        found = _BLOCK.fullmatch(module)
        if found is None or found[3] not in _IN_BLOCK:
            return None
        native, part = _IN_BLOCK[found[3]]
        return Target(f"{_BLOCKS[found[1]]}.{found[2]}.{native}", part)

    def runs(self, module: str, rows: int, architecture: Architecture | None) -> list[tuple[int, int]]:
        if not module.endswith(_SWAPPED):
            return super().runs(module, rows, architecture)
        half = rows // 2
        return [(half, half), (0, half)]


APART = _Apart("q, k and v apart, halves of fc1 swapped")


class Diffusers(Format):
    """bf16 by these names."""

    name = "Diffusers bf16"
    quantized = False

    @classmethod
    def told(cls, signs: Signs, layout: Layout | None) -> Format | None:
        return cls(layout) if layout == APART else None
