"""The coding of one stored weight, from its dtype and the tensors beside it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.kernels.formats import FP8, INT8
from vllm_h3_quant.kernels.hadamard import MAX_GROUP
from vllm_h3_quant.loader import naming
from vllm_h3_quant.loader.coding import NVFP4_BLOCK, Coding, NvFp4, Scaled, Values
from vllm_h3_quant.loader.formats import Kind
from vllm_h3_quant.loader.header import Entry
from vllm_h3_quant.loader.reader import mapped

if TYPE_CHECKING:
    from vllm_h3_quant.loader.plan import Plan

LINEAR_KEY = "linear."
"""Key of an export's metadata before a linear's name: how its codes were made, as JSON."""

_VALUES = ("BF16", "F16", "F32")
_LARGEST_CODE = {"F8_E4M3": FP8.max, "F8_E5M2": 57344.0, "I8": INT8.max}


@dataclass(frozen=True)
class Found:
    """A weight and the module it has in its file."""

    entry: Entry
    module: str


def coding_of(found: Found, beside: Mapping[str, Entry], plan: Plan) -> Coding:
    """How ``found`` is coded.

    Raises:
        H3QuantError: codes without a scale, a scale without codes, one of a wrong shape, not finite or not positive,
            or a marker that cannot be read.
    """
    entry = found.entry
    scale = beside.get(naming.SCALE)
    if entry.dtype in _VALUES:
        _refuse_scale_of_values(entry, beside)
        return Values()
    if entry.dtype not in (*_LARGEST_CODE, "U8"):
        raise H3QuantError(f"{entry.file}: tensor {entry.name!r} is {entry.dtype}, which no linear of this model holds")
    if scale is None:
        raise H3QuantError(
            f"{entry.file}: tensor {entry.name!r} holds {entry.dtype} codes without a {naming.SCALE} beside them: what"
            " they stand for is not known; use a checkpoint with scales"
        )
    if entry.dtype == "U8":
        return _nvfp4(entry, scale, beside.get(naming.GLOBAL_SCALE))
    if naming.GLOBAL_SCALE in beside:
        extra = beside[naming.GLOBAL_SCALE]
        raise H3QuantError(f"{extra.file}: tensor {extra.name!r} belongs to NVFP4, not to {entry.dtype} codes")
    regular = _marked_rotation(entry, beside.get(naming.MARKER))
    rotation = _stated_rotation(found, plan) if plan.detection.kind is Kind.EXPORT else 0
    values = _positive(scale, _LARGEST_CODE[entry.dtype])
    rows, columns = entry.shape
    grid = tuple(values.shape)
    if values.numel() == 1:
        grid = (1, 1)
    elif len(grid) == 1:
        grid = (grid[0], 1)
    blocks = [_block(size, count) for size, count in zip((rows, columns), grid, strict=False)]
    if len(grid) != 2 or 0 in blocks:
        raise H3QuantError(
            f"{scale.file}: tensor {scale.name!r} has the shape {list(scale.shape)}, which is no scale of a weight"
            f" {list(entry.shape)}: expected one, one for each of {rows} rows, or one for each block"
        )
    row_block, column_block = blocks
    return Scaled(values.reshape(grid), row_block, column_block, regular=regular, rotation=rotation)


def _block(size: int, count: int) -> int:
    """Neighbours that share a scale where ``size`` have ``count`` of them; 0 where no block size gives as many.

    A power of two comes before an equal division: two scales of 192 columns are blocks of 128, the last one cut off.
    """
    if not 0 < count <= size:
        return 0
    power = 1 << (-(-size // count) - 1).bit_length()
    if count == 1 or -(-size // power) != count:
        return 0 if size % count else size // count
    return power


def _refuse_scale_of_values(entry: Entry, beside: Mapping[str, Entry]) -> None:
    for scale in (beside.get(naming.SCALE), beside.get(naming.GLOBAL_SCALE)):
        if scale is not None and not bool((mapped(scale).float() == 1.0).all()):
            raise H3QuantError(
                f"{scale.file}: tensor {scale.name!r} is a scale beside {entry.dtype} values: nothing would consume it"
            )


def _positive(entry: Entry, largest_code: float) -> torch.Tensor:
    """A scale tensor in fp32, every element finite, positive and small enough for the largest code."""
    if entry.dtype not in ("F32", "F16", "BF16"):
        raise H3QuantError(f"{entry.file}: tensor {entry.name!r} is {entry.dtype}, which is no dtype of a scale")
    values = mapped(entry).float().clone()
    bad = ~((values > 0) & (values * largest_code).isfinite())
    if bad.any():
        index = bad.nonzero()[0].tolist()
        raise H3QuantError(
            f"{entry.file}: tensor {entry.name!r} holds the scale {values[tuple(index)].item()} at {index}; a scale is"
            " finite and above zero: convert the checkpoint again"
        )
    return values


def _nvfp4(entry: Entry, scale: Entry, global_scale: Entry | None) -> NvFp4:
    rows, stored = entry.shape
    if global_scale is None or math.prod(global_scale.shape) != 1:
        raise H3QuantError(f"{entry.file}: tensor {entry.name!r} holds NVFP4 codes without one {naming.GLOBAL_SCALE}")
    if scale.dtype != "F8_E4M3" or scale.shape != (rows, 2 * stored // NVFP4_BLOCK) or 2 * stored % NVFP4_BLOCK:
        raise H3QuantError(
            f"{scale.file}: tensor {scale.name!r} is {scale.dtype} {list(scale.shape)}; NVFP4 codes {[rows, stored]}"
            f" take F8_E4M3 {[rows, 2 * stored // NVFP4_BLOCK]}"
        )
    values = mapped(scale)
    bytes_ = values.view(torch.uint8)
    bad = bytes_ >= 0x7F  # NaN, and everything with a sign
    if bad.any():
        raise H3QuantError(
            f"{scale.file}: tensor {scale.name!r} holds the scale {values[bad][0].item()} at"
            f" {bad.nonzero()[0].tolist()}; a scale is finite and not negative"
        )
    return NvFp4(values, float(_positive(global_scale, 448.0 * 6.0)))


def _marked_rotation(entry: Entry, marker: Entry | None) -> int:
    """The group of ConvRot's rotation that ComfyUI's marker states; 0 for none."""
    if marker is None:
        return 0
    where = f"{marker.file}: tensor {marker.name!r}"
    try:
        stated: Any = json.loads(bytes(mapped(marker).to(torch.uint8).flatten().tolist()).decode())
    except (ValueError, RecursionError) as error:
        raise H3QuantError(f"{where} is no JSON: {error}") from None
    if not isinstance(stated, dict):
        raise H3QuantError(f"{where} holds {stated!r}, not a mapping")
    wanted = {"I8": "int8_tensorwise", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}[entry.dtype]
    if stated.get("format") != wanted:
        raise H3QuantError(f"{where} states the format {stated.get('format')!r}, but the weight is {wanted}")
    if not stated.get("convrot"):
        return 0
    group = stated.get("convrot_groupsize", 256)
    if type(group) is not int or group not in (4, 16, 64, 256, 1024) or entry.shape[1] % group:
        raise H3QuantError(
            f"{where} states convrot_groupsize={group!r}; expected a power of 4 up to 1024 that divides"
            f" {entry.shape[1]} columns"
        )
    return group


def _stated_rotation(found: Found, plan: Plan) -> int:
    """The group of this package's rotation that an export's metadata states."""
    text = plan.checkpoint.metadata.get(LINEAR_KEY + found.module)
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
    wanted = {"fp8": "F8_E4M3", "int8": "I8"}.get(str(stated.get("format")))
    if found.entry.dtype != wanted:
        raise H3QuantError(f"{where} states the format {stated.get('format')!r}, but its codes are {found.entry.dtype}")
    return rotation
