"""Which format a checkpoint has. A format is a file here and an entry in :data:`FORMATS`.

=====================  =============================================  ==========================================
layout                 example                                        where
=====================  =============================================  ==========================================
native                 ``blocks.0.attn.qkv_proj.weight``              MiniMax's release, ComfyUI, our export
prefixed               ``model.diffusion_model.blocks.0...``          ComfyUI's single files
Diffusers              ``transformer_blocks.0.attn.to_q.weight``      Diffusers, ModelOpt exports of it
Qwen3-VL               ``model.language_model.layers.0...q_proj...``  the text encoder
=====================  =============================================  ==========================================

The other rooms ask a format what it is for and what it says of a tensor; none of them knows one by name.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_h3_quant.config.components import TRANSFORMER
from vllm_h3_quant.loader.checkpoint import Checkpoint
from vllm_h3_quant.loader.formats import beside
from vllm_h3_quant.loader.formats.base import Format, Layout, Unknown, signs_of
from vllm_h3_quant.loader.formats.comfy import IN_THIRDS, Comfy
from vllm_h3_quant.loader.formats.comfy_fp8 import ComfyFp8
from vllm_h3_quant.loader.formats.comfy_int8 import ComfyInt8
from vllm_h3_quant.loader.formats.diffusers import APART, Diffusers
from vllm_h3_quant.loader.formats.export import Export
from vllm_h3_quant.loader.formats.modelopt_fp8 import ModelOptFp8
from vllm_h3_quant.loader.formats.modelopt_nvfp4 import ModelOptNvFp4
from vllm_h3_quant.loader.formats.native import BY_HEAD, Native
from vllm_h3_quant.loader.formats.pruned import is_pruned
from vllm_h3_quant.loader.formats.qwen3vl import QWEN3VL, Qwen3Vl

FORMATS: tuple[type[Format], ...] = (
    Export,
    Qwen3Vl,
    ModelOptNvFp4,
    ComfyInt8,
    ModelOptFp8,
    ComfyFp8,
    Diffusers,
    Comfy,
    Native,
)
"""All formats, in the order in which they are asked."""

LAYOUTS: tuple[Layout, ...] = (QWEN3VL, APART, IN_THIRDS, BY_HEAD)
"""All layouts, likewise."""

_KINDS = {**beside.COMMON, **{last: kind for form in FORMATS for last, kind in form.kinds.items()}}
_LOOSE = frozenset(name for form in FORMATS for name in form.loose)


@dataclass(frozen=True)
class Detection:
    """What a component is.

    Attributes:
        format: its format.
        curve: whether a curve over timesteps replaces the time embedder (a pruned checkpoint).
    """

    format: Format
    curve: bool = False

    @property
    def name(self) -> str:
        return self.format.name + (", pruned to a curve" if self.curve else "")

    @property
    def layout(self) -> Layout:
        return self.format.layout

    @property
    def quantized(self) -> bool:
        return self.format.quantized


def detect(checkpoint: Checkpoint) -> Detection:
    """The format of ``checkpoint``. Reads no tensor."""
    signs = signs_of(checkpoint, _KINDS)
    layout = next((each for each in LAYOUTS if each.has(signs)), None)
    asked = (form.told(signs, layout) for form in FORMATS)
    found = next((each for each in asked if each is not None), None) or Unknown(layout or BY_HEAD)
    served = found.known and not found.is_export and found.layout.component == TRANSFORMER
    return Detection(found, curve=served and is_pruned(signs))


def split(name: str) -> tuple[str, str]:
    """The module of a tensor and its kind in any format (:mod:`vllm_h3_quant.loader.formats.beside`).

    The kind is empty for a tensor that belongs to no linear or norm.
    """
    return beside.split(name, _KINDS)


def is_loose(name: str) -> bool:
    """Whether a tensor, named without a prefix, carries no value in any format."""
    return name in _LOOSE


def engine_layout(*, own_names: bool) -> Layout:
    """The layout in which the engine takes the DiT.

    Args:
        own_names: whether its model expects Diffusers names, as it does for FastVideo's modular releases.
    """
    return APART if own_names else BY_HEAD
