"""Which kind of checkpoint a component is, from names and dtypes alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from vllm_h3_quant.loader import naming
from vllm_h3_quant.loader.checkpoint import Checkpoint

EXPORT_FORMAT = "vllm-h3-quant"
"""Value of ``format`` in the metadata of this package's exports."""


class Kind(Enum):
    """A checkpoint format. The value is what :command:`check` prints."""

    NATIVE = "MiniMax-H3 bf16"
    DIFFUSERS = "Diffusers bf16"
    COMFY = "ComfyUI bf16"
    COMFY_FP8 = "ComfyUI FP8 scaled"
    COMFY_INT8 = "ComfyUI INT8"
    MODELOPT_FP8 = "ModelOpt FP8"
    MODELOPT_NVFP4 = "ModelOpt NVFP4"
    EXPORT = "vllm-h3-quant export"
    TEXT_ENCODER = "Qwen3-VL bf16"
    UNKNOWN = "unknown"


class Layout(Enum):
    """In which order a checkpoint keeps the rows of ``qkv_proj`` and ``fc1``."""

    GROUPED = "rows of qkv_proj by head: q, k, v of one head, then of the next"
    THIRDS = "rows of qkv_proj in thirds: q of all heads, then k, then v"
    DIFFUSERS = "q, k and v apart, halves of fc1 swapped"


@dataclass(frozen=True)
class Detection:
    """What a component is.

    Attributes:
        kind: its format.
        layout: the order of its rows.
        curve: whether a curve over timesteps replaces the time embedder (a pruned checkpoint).
        quantized: whether its linears hold codes.
    """

    kind: Kind
    layout: Layout = Layout.GROUPED
    curve: bool = False

    @property
    def quantized(self) -> bool:
        return self.kind not in (Kind.NATIVE, Kind.DIFFUSERS, Kind.COMFY, Kind.TEXT_ENCODER, Kind.UNKNOWN)

    @property
    def name(self) -> str:
        return self.kind.value + (", pruned to a curve" if self.curve else "")


def detect(checkpoint: Checkpoint) -> Detection:
    """The format of ``checkpoint``. Reads no tensor."""
    names = list(checkpoint.entries)
    bare = {naming.without_prefix(name): checkpoint.entries[name] for name in names}
    leaves = {naming.split(name)[1] for name in bare}
    if checkpoint.metadata.get("format") == EXPORT_FORMAT:
        return Detection(Kind.EXPORT, Layout.THIRDS)
    if any(name.startswith("model.language_model.") for name in names):
        dtypes = {entry.dtype for name, entry in bare.items() if naming.split(name)[1] == naming.WEIGHT}
        return Detection(Kind.TEXT_ENCODER if dtypes <= {"BF16", "F16", "F32"} else Kind.UNKNOWN)
    diffusers = any(map(naming.is_diffusers, bare))
    if not diffusers and not any(name.startswith("blocks.") for name in bare):
        return Detection(Kind.UNKNOWN)
    curve = naming.CURVE in bare
    dtypes = {entry.dtype for name, entry in bare.items() if naming.split(name)[1] == naming.WEIGHT}
    comfy = len(bare) and any(name.startswith(naming.PREFIXES) for name in names)
    comfy = comfy or naming.MARKER in leaves or bool(bare.keys() & naming.LOOSE)
    modelopt = _modelopt(checkpoint.config)
    if "U8" in dtypes:
        kind = Kind.MODELOPT_NVFP4
    elif "I8" in dtypes:
        kind, comfy = Kind.COMFY_INT8, True
    elif "F8_E4M3" in dtypes or "F8_E5M2" in dtypes:
        # Both know a scalar scale beside the weight; ModelOpt also says in the configuration that it wrote the file.
        comfy = comfy or not (modelopt or diffusers)
        kind = Kind.COMFY_FP8 if comfy else Kind.MODELOPT_FP8
    else:
        kind = Kind.DIFFUSERS if diffusers else Kind.COMFY if comfy else Kind.NATIVE
    layout = Layout.DIFFUSERS if diffusers else Layout.THIRDS if comfy else Layout.GROUPED
    return Detection(kind, layout, curve)


def _modelopt(config: Mapping[str, Any]) -> bool:
    stated = config.get("quantization_config")
    if not isinstance(stated, Mapping):
        return False
    producer = stated.get("producer")
    names = [stated.get("quant_method"), producer.get("name") if isinstance(producer, Mapping) else None]
    return any(isinstance(name, str) and name.lower().startswith("modelopt") for name in names)
