"""ModelOpt's FP8: e4m3 codes with a scale for a tensor, a row or a block, by Diffusers or by native names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from vllm_h3_quant.loader.coding import Coding
from vllm_h3_quant.loader.formats.base import Format, Layout, Signs, of_transformer
from vllm_h3_quant.loader.formats.beside import FP8_DTYPES, SCALE, Beside, Found, scaled, values
from vllm_h3_quant.loader.formats.comfy import is_marked
from vllm_h3_quant.loader.formats.diffusers import APART


class ModelOptFp8(Format):
    """FP8 codes without a mark of ComfyUI's, which knows a scalar scale beside a weight, too.

    ModelOpt says in the configuration that it wrote the file; Diffusers names are enough, since no other writer of
    codes has them.
    """

    name = "ModelOpt FP8"
    kinds: ClassVar[Mapping[str, str]] = {"weight_scale_inv": SCALE}

    @classmethod
    def told(cls, signs: Signs, layout: Layout | None) -> Format | None:
        if not of_transformer(layout) or not signs.dtypes & FP8_DTYPES or is_marked(signs):
            return None
        return cls(layout) if layout == APART or _wrote(signs.config) else None

    def coding_of(self, found: Found, beside: Beside, metadata: Mapping[str, str]) -> Coding:
        return values(found, beside) or scaled(found, beside)


def _wrote(config: Mapping[str, Any]) -> bool:
    stated = config.get("quantization_config")
    if not isinstance(stated, Mapping):
        return False
    producer = stated.get("producer")
    names = [stated.get("quant_method"), producer.get("name") if isinstance(producer, Mapping) else None]
    return any(isinstance(name, str) and name.lower().startswith("modelopt") for name in names)
