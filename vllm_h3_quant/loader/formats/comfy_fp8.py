"""ComfyUI's scaled FP8: e4m3 or e5m2 codes with a scale, a marker or none, and an input scale that is not used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from vllm_h3_quant.loader.coding import Coding
from vllm_h3_quant.loader.formats import comfy
from vllm_h3_quant.loader.formats.base import Format, Layout, Signs, of_transformer
from vllm_h3_quant.loader.formats.beside import FP8_DTYPES, INPUT_SCALE, SCALE, Beside, Found


class ComfyFp8(Format):
    """FP8 codes that are not ModelOpt's, which is asked before."""

    name = "ComfyUI FP8 scaled"
    kinds: ClassVar[Mapping[str, str]] = {"scale_weight": SCALE, "scale_input": INPUT_SCALE}

    @classmethod
    def told(cls, signs: Signs, layout: Layout | None) -> Format | None:
        return cls(comfy.in_thirds(layout)) if of_transformer(layout) and signs.dtypes & FP8_DTYPES else None

    def coding_of(self, found: Found, beside: Beside, metadata: Mapping[str, str]) -> Coding:
        return comfy.coded(found, beside)
