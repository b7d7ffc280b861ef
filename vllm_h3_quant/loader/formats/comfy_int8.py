"""ComfyUI's INT8: symmetric codes with a scale for each row or for all, rotated where a marker says ConvRot."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_h3_quant.loader.coding import Coding
from vllm_h3_quant.loader.formats import comfy
from vllm_h3_quant.loader.formats.base import Format, Layout, Signs, of_transformer
from vllm_h3_quant.loader.formats.beside import Beside, Found


class ComfyInt8(Format):
    """INT8 codes; nobody else publishes them."""

    name = "ComfyUI INT8"

    @classmethod
    def told(cls, signs: Signs, layout: Layout | None) -> Format | None:
        return cls(comfy.in_thirds(layout)) if of_transformer(layout) and "I8" in signs.dtypes else None

    def coding_of(self, found: Found, beside: Beside, metadata: Mapping[str, str]) -> Coding:
        return comfy.coded(found, beside)
