"""What a user may ask for: typed, frozen, checked once.

A configuration is a method name (``"h3_fp8"``) or a mapping with a ``method`` and the keys of
:class:`H3QuantOptions`. Everything here is data; layers and kernels are not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from vllm_h3_quant.errors import H3QuantError, unknown


class Method(str, Enum):
    """Weight and activation format of the quantized linears."""

    FP8 = "h3_fp8"
    INT8 = "h3_int8"


METHODS: tuple[str, ...] = tuple(method.value for method in Method)

MAX_ROTATION = 512


class H3QuantOptions(BaseModel):
    """One component's quantization.

    Attributes:
        method: ``h3_fp8`` (e4m3 codes) or ``h3_int8`` (symmetric codes); both with one fp32 scale
            per output channel of the weight and one per token of the activation.
        ignored_layers: linears to leave at checkpoint precision. An entry is a linear's name
            (``blocks.0.attn.qkv_proj``), a parent (``blocks.0.attn``) or an ``fnmatch`` pattern
            over either (``blocks.*.mlp.fc2``). An entry that matches nothing stops the start.
        adaln: ``quantize`` or ``keep``. The AdaLN projections are 40% of the DiT's bytes and a
            negligible part of its time.
        rotation: width of the Hadamard rotation of the input dimension before INT8 quantization,
            a power of two up to 512, or 0 for none. FP8 takes none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)

    method: Method
    ignored_layers: tuple[str, ...] = ()
    adaln: Literal["quantize", "keep"] = "quantize"
    rotation: int = 0

    @field_validator("ignored_layers", mode="before")
    @classmethod
    def _no_bare_string(cls, value: object) -> object:
        if isinstance(value, str):
            raise ValueError(f"expected a list of names, for example [{value!r}]")
        return () if value is None else value

    @field_validator("rotation")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value < 0 or value > MAX_ROTATION or value & (value - 1) or value == 1:
            below = 1 << max(1, min(value, MAX_ROTATION).bit_length() - 1) if value > 0 else 0
            raise ValueError(f"expected 0 or a power of two from 2 to {MAX_ROTATION}, nearest is {below}")
        return value


PRESETS: dict[Method, dict[str, Any]] = {
    Method.FP8: {},
    Method.INT8: {"rotation": 256},
}
"""What a method name alone stands for."""

KEYS: tuple[str, ...] = tuple(key for key in H3QuantOptions.model_fields if key != "method")


def parse(method: str, options: Mapping[str, Any] | None = None, *, where: str) -> H3QuantOptions:
    """Check a method name and its keys and freeze them.

    Args:
        method: a name of :class:`Method`; ``-`` counts as ``_``, upper case as lower case.
        options: the keys beside the method; read only, never changed.
        where: where the configuration was given, for the error.

    Raises:
        H3QuantError: unknown method or key (with the nearest valid one), or a bad value.
    """
    name = str(method).lower().replace("-", "_")
    if name not in METHODS:
        raise unknown("method", method, METHODS, where=where)
    given = dict(options or {})
    for key in given:
        if key not in KEYS:
            raise unknown(f"key of {name}", key, KEYS, where=where)
    chosen = Method(name)
    if chosen is Method.FP8 and given.get("rotation"):
        raise H3QuantError(
            f"{where}: rotation={given['rotation']!r} has no use with {name}; remove it or use {Method.INT8.value}"
        )
    try:
        return H3QuantOptions(method=chosen, **{**PRESETS[chosen], **given})
    except ValidationError as error:
        raise _one_line(error, where) from None


def _one_line(error: ValidationError, where: str) -> H3QuantError:
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"])
    reason = first["msg"].removeprefix("Value error, ")
    return H3QuantError(f"{where}: {key}={first['input']!r} is not valid: {reason}")
