"""Qwen3-VL as MiniMax-H3's text encoder: q, k, v, gate and up apart, or fused as the model has them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from vllm_h3_quant.config.components import TEXT_ENCODER
from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.loader.checkpoint import Checkpoint
from vllm_h3_quant.loader.formats.base import Format, Layout, Signs, Target
from vllm_h3_quant.loader.header import FLOATS

_DECODER, _MODEL = "model.language_model.", "text_model."
"""The text decoder's modules in a file, and in the engine's model."""

_PARTS = {
    "qkv_proj": {"q": "q_proj", "k": "k_proj", "v": "v_proj"},
    "gate_up_proj": {"gate": "gate_proj", "up": "up_proj"},
}
"""Linears that the model fuses, and their parts' names in a file."""

_LINEARS = {
    **{name: (fused, part) for fused, parts in _PARTS.items() for part, name in parts.items()},
    **{name: (name, "") for name in (*_PARTS, "o_proj", "down_proj")},
}
_LAYER = re.compile(rf"{re.escape(_DECODER)}layers\.(\d{{1,4}})\.", re.ASCII)
_LINEAR = re.compile(rf"{re.escape(_DECODER)}(layers\.\d{{1,4}}\.(?:self_attn|mlp))\.(\w+)", re.ASCII)


@dataclass(frozen=True)
class _Qwen3Vl(Layout):
    """Names such as ``model.language_model.layers.0.self_attn.q_proj.weight``; only the decoder's linears are moved."""

    component = TEXT_ENCODER
    fused = False
    named = "Qwen3-VL"
    unread = ("lm_head.weight", f"{_DECODER}norm.weight")  # the engine takes the hidden states of a layer

    def has(self, signs: Signs) -> bool:
        return any(name.startswith(_DECODER) for name in signs.names)

    def bare(self, name: str) -> str:
        return name

    def target(self, module: str) -> Target | None:
        found = _LINEAR.fullmatch(module)
        if found is None or found[2] not in _LINEARS:
            return None
        fused, part = _LINEARS[found[2]]
        return Target(f"{_MODEL}{found[1]}.{fused}", part)

    def layer(self, name: str) -> int | None:
        found = _LAYER.match(name)
        return int(found[1]) if found else None

    def module(self, name: str) -> str:
        return name.replace(_MODEL, _DECODER, 1)

    def taken_apart(self, module: str, rows: int, checkpoint: Checkpoint) -> list[tuple[str, int]]:
        stem, _, last = module.rpartition(".")
        if last not in _PARTS:
            return super().taken_apart(module, rows, checkpoint)
        counts = _heads(module, checkpoint) if last == "qkv_proj" else [1, 1]
        unit = rows // sum(counts)
        return [(f"{stem}.{name}", unit * count) for name, count in zip(_PARTS[last].values(), counts, strict=True)]


QWEN3VL = _Qwen3Vl("q, k and v of the decoder apart, gate and up too; or fused in this order")


class Qwen3Vl(Format):
    """bf16."""

    name = "Qwen3-VL bf16"
    quantized = False

    @classmethod
    def told(cls, signs: Signs, layout: Layout | None) -> Format | None:
        return cls(layout) if layout == QWEN3VL and signs.dtypes <= set(FLOATS) else None


def _heads(module: str, checkpoint: Checkpoint) -> list[int]:
    """Heads of q, k and v."""
    config = checkpoint.config.get("text_config", checkpoint.config)
    try:
        heads, groups = int(config["num_attention_heads"]), int(config["num_key_value_heads"])
    except (KeyError, TypeError, ValueError):
        raise H3QuantError(
            f"{checkpoint.place / 'config.json'}: states no num_attention_heads and num_key_value_heads, which"
            f" {module.replace(_DECODER, _MODEL, 1)} is split by"
        ) from None
    return [heads, groups, groups]
