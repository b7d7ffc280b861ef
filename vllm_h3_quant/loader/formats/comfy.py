"""ComfyUI's files: the model's names behind a prefix, rows of ``qkv_proj`` in thirds, markers beside weights.

A marker is a ``uint8`` tensor ``comfy_quant`` with JSON, such as ``{"format": "int8_tensorwise", "convrot": true,
"convrot_groupsize": 256}``. Older files have a tensor ``scaled_fp8`` instead, and other names for scales.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.loader.coding import Coding
from vllm_h3_quant.loader.formats.base import PREFIXES, Format, Layout, Signs
from vllm_h3_quant.loader.formats.beside import Beside, Found, scaled, values
from vllm_h3_quant.loader.formats.convrot import ConvRot, group_of
from vllm_h3_quant.loader.formats.native import NativeNames
from vllm_h3_quant.loader.header import Entry
from vllm_h3_quant.loader.reader import mapped

MARKER = "comfy_quant"
_LOOSE = ("scaled_fp8",)
_FORMATS = {"I8": "int8_tensorwise", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
"""What a marker calls codes of a dtype."""


def is_marked(signs: Signs) -> bool:
    """Whether a file bears one of ComfyUI's marks."""
    prefixed = any(name.startswith(PREFIXES) for name in signs.names)
    return prefixed or MARKER in signs.kinds or any(name in signs.bare for name in _LOOSE)


class _InThirds(NativeNames):
    """q of all heads, then k, then v, as the model keeps them."""

    def has(self, signs: Signs) -> bool:
        return super().has(signs) and is_marked(signs)


IN_THIRDS = _InThirds("rows of qkv_proj in thirds: q of all heads, then k, then v")


class Comfy(Format):
    """bf16 with a mark."""

    name = "ComfyUI bf16"
    quantized = False
    kinds: ClassVar[Mapping[str, str]] = {MARKER: MARKER}
    loose = _LOOSE

    @classmethod
    def told(cls, signs: Signs, layout: Layout | None) -> Format | None:
        return cls(layout) if layout == IN_THIRDS else None


def in_thirds(layout: Layout) -> Layout:
    """The layout of a file that is ComfyUI's by its codes: native names without a mark are in thirds there, too."""
    return IN_THIRDS if isinstance(layout, NativeNames) else layout


def coded(found: Found, beside: Beside) -> Coding:
    """Values, or 8-bit codes that a marker may describe.

    Raises:
        H3QuantError: as for :meth:`Format.coding_of`.
    """
    plain = values(found, beside)
    if plain is not None:
        return plain
    codes = scaled(found, beside)
    marker = beside.get(MARKER)
    if marker is None:
        return codes
    where = f"{marker.file}: tensor {marker.name!r}"
    stated = _stated(marker, where)
    wanted = _FORMATS[found.entry.dtype]
    if stated.get("format") != wanted:
        raise H3QuantError(f"{where} states the format {stated.get('format')!r}, but the weight is {wanted}")
    if not stated.get("convrot"):
        return codes
    group = group_of(stated, found.entry.shape[1], where)
    return ConvRot(codes.scale, codes.row_block, codes.column_block, group=group)


def _stated(marker: Entry, where: str) -> dict[str, Any]:
    try:
        stated = json.loads(bytes(mapped(marker).to(torch.uint8).flatten().tolist()).decode())
    except (ValueError, RecursionError) as error:
        raise H3QuantError(f"{where} is no JSON: {error}") from None
    if not isinstance(stated, dict):
        raise H3QuantError(f"{where} holds {stated!r}, not a mapping")
    return stated
