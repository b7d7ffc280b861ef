"""This package's own exports: the model's names and order of rows, and metadata that says how codes were made."""

from __future__ import annotations

import json
from collections.abc import Mapping

from vllm_h3_quant.config.components import TEXT_ENCODER
from vllm_h3_quant.config.schema import EXPORT_FORMAT
from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.kernels.formats import BY_NAME, CodeFormat
from vllm_h3_quant.kernels.hadamard import MAX_GROUP
from vllm_h3_quant.loader.coding import Coding, Scaled
from vllm_h3_quant.loader.formats.base import Format, Layout, Signs
from vllm_h3_quant.loader.formats.beside import INPUT_SCALE, SCALE, Beside, Found, scaled, values
from vllm_h3_quant.loader.formats.comfy import IN_THIRDS
from vllm_h3_quant.loader.formats.qwen3vl import QWEN3VL

_LINEAR = "linear."
"""Key of the metadata before a linear's name in the file: how its codes were made, as JSON."""


def written_layout(component: str) -> Layout:
    """The names and order of rows in which a component is exported."""
    return QWEN3VL if component == TEXT_ENCODER else IN_THIRDS


def statement(module: str, fmt: CodeFormat, rotation: int) -> tuple[str, str]:
    """Key and value of the metadata that state how the codes of a file's ``module`` were made.

    Args:
        module: its name in the file.
        fmt: of its codes.
        rotation: group of the rotation that they were made after, 0 for none.
    """
    return _LINEAR + module, json.dumps({"format": fmt.name, "rotation": rotation})


class Export(Format):
    """What the metadata calls so."""

    name = f"{EXPORT_FORMAT} export"
    is_export = True

    @classmethod
    def told(cls, signs: Signs, layout: Layout | None) -> Format | None:
        if signs.metadata.get("format") != EXPORT_FORMAT:
            return None
        return cls(QWEN3VL if layout == QWEN3VL else IN_THIRDS)

    def coding_of(self, found: Found, beside: Beside, metadata: Mapping[str, str]) -> Coding:
        plain = values(found, beside)
        if plain is not None:
            return plain
        codes = scaled(found, beside)
        for kind, entry in beside.items():
            if kind not in (SCALE, INPUT_SCALE):
                raise H3QuantError(f"{entry.file}: tensor {entry.name!r} belongs to no export; export the model again")
        rotation = _rotation(found, metadata)
        return Scaled(codes.scale, codes.row_block, codes.column_block, rotation)


def _rotation(found: Found, metadata: Mapping[str, str]) -> int:
    """The group of this package's rotation that the metadata states."""
    text = metadata.get(_LINEAR + found.module)
    where = f"{found.entry.file}: metadata of {found.module!r}"
    try:
        stated = json.loads(text) if text else None
    except (ValueError, RecursionError):
        stated = None
    if not isinstance(stated, dict):
        raise H3QuantError(f"{where} is {text!r}, not how its codes were made; export the model again")
    rotation = stated.get("rotation")
    good = rotation == 0 or (isinstance(rotation, int) and 2 <= rotation <= MAX_GROUP and not rotation & (rotation - 1))
    if not isinstance(rotation, int) or not good or (rotation and found.entry.shape[1] % rotation):
        raise H3QuantError(f"{where} states rotation={rotation!r}; export the model again")
    fmt = BY_NAME.get(str(stated.get("format")))
    if fmt is None or found.entry.torch_dtype is not fmt.dtype:
        raise H3QuantError(f"{where} states the format {stated.get('format')!r}, but its codes are {found.entry.dtype}")
    return rotation
