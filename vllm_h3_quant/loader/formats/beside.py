"""What stands beside a weight in a file, and the codings that more than one format makes of it.

A companion's kind follows from the last part of its name. What it means is for the file's format to say; a companion
of which a weight makes no use is refused, whatever format knows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.kernels.formats import FP8, INT8
from vllm_h3_quant.loader.coding import Scaled, Values
from vllm_h3_quant.loader.header import FLOATS, Entry
from vllm_h3_quant.loader.reader import mapped

WEIGHT, BIAS = "weight", "bias"
SCALE, GLOBAL_SCALE, INPUT_SCALE = "weight_scale", "weight_scale_2", "input_scale"

COMMON = {name: name for name in (WEIGHT, BIAS, SCALE, GLOBAL_SCALE, INPUT_SCALE)}
"""Last parts of names, and the kinds that they are, for more than one format."""

FP8_DTYPES = frozenset({"F8_E4M3", "F8_E5M2"})

Beside = Mapping[str, Entry]
"""A weight's companions by kind."""

_LARGEST_CODE = {"F8_E4M3": FP8.max, "F8_E5M2": 57344.0, "I8": INT8.max}


@dataclass(frozen=True)
class Found:
    """A weight and the module it has in its file."""

    entry: Entry
    module: str


def split(name: str, kinds: Mapping[str, str]) -> tuple[str, str]:
    """The module of a tensor and its kind by ``kinds``, empty for one that belongs to no linear or norm."""
    module, _, last = name.rpartition(".")
    return module, kinds.get(last, "") if module else ""


def values(found: Found, beside: Beside) -> Values | None:
    """The coding of a weight that holds values; None for one of codes.

    Raises:
        H3QuantError: a scale other than 1 beside values.
    """
    if found.entry.dtype not in FLOATS:
        return None
    for scale in (beside.get(SCALE), beside.get(GLOBAL_SCALE)):
        if scale is not None and not bool((mapped(scale).float() == 1.0).all()):
            raise H3QuantError(
                f"{scale.file}: tensor {scale.name!r} is a scale beside {found.entry.dtype} values: nothing would"
                " consume it"
            )
    return Values()


def only_values(found: Found, beside: Beside) -> Values:
    """The coding of a weight of a format without codes.

    Raises:
        H3QuantError: as for :func:`values`, and a weight of another dtype.
    """
    plain = values(found, beside)
    if plain is None:
        raise no_weight(found)
    return plain


def scale_of(found: Found, beside: Beside) -> Entry:
    """The scales of a weight that holds codes.

    Raises:
        H3QuantError: there are none.
    """
    entry = found.entry
    if SCALE not in beside:
        raise H3QuantError(
            f"{entry.file}: tensor {entry.name!r} holds {entry.dtype} codes without a {SCALE} beside them: what they"
            " stand for is not known; use a checkpoint with scales"
        )
    return beside[SCALE]


def scaled(found: Found, beside: Beside) -> Scaled:
    """The coding of 8-bit codes with a scale for all of them, for each row or for each block; not rotated.

    Raises:
        H3QuantError: another dtype, codes without a scale, a second scale, or a scale of a wrong shape, not finite or
            not positive.
    """
    entry = found.entry
    if entry.dtype not in _LARGEST_CODE:
        raise no_weight(found)
    scale = scale_of(found, beside)
    if GLOBAL_SCALE in beside:
        extra = beside[GLOBAL_SCALE]
        raise H3QuantError(f"{extra.file}: tensor {extra.name!r} belongs to NVFP4, not to {entry.dtype} codes")
    numbers = positive(scale, _LARGEST_CODE[entry.dtype])
    rows, columns = entry.shape
    grid = tuple(numbers.shape)
    if numbers.numel() == 1:
        grid = (1, 1)
    elif len(grid) == 1:
        grid = (grid[0], 1)
    blocks = [_block(size, count) for size, count in zip((rows, columns), grid, strict=False)]
    if len(grid) != 2 or 0 in blocks:
        raise H3QuantError(
            f"{scale.file}: tensor {scale.name!r} has the shape {list(scale.shape)}, which is no scale of a weight"
            f" {list(entry.shape)}: expected one, one for each of {rows} rows, or one for each block"
        )
    return Scaled(numbers.reshape(grid), *blocks)


def positive(entry: Entry, largest_code: float) -> torch.Tensor:
    """A scale tensor in fp32, every element finite, positive and small enough for the largest code.

    Raises:
        H3QuantError: an element is not, or the tensor's dtype is none of a scale.
    """
    if entry.dtype not in FLOATS:
        raise H3QuantError(f"{entry.file}: tensor {entry.name!r} is {entry.dtype}, which is no dtype of a scale")
    numbers = mapped(entry).float().clone()
    bad = ~((numbers > 0) & (numbers * largest_code).isfinite())
    if bad.any():
        index = bad.nonzero()[0].tolist()
        raise H3QuantError(
            f"{entry.file}: tensor {entry.name!r} holds the scale {numbers[tuple(index)].item()} at {index}; a scale is"
            " finite and above zero: convert the checkpoint again"
        )
    return numbers


def no_weight(found: Found) -> H3QuantError:
    """The error of a weight whose dtype its format does not code by."""
    entry = found.entry
    return H3QuantError(f"{entry.file}: tensor {entry.name!r} is {entry.dtype}, which no linear of this model holds")


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
