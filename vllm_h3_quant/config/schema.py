"""What a user may ask for: typed, frozen, checked once.

A configuration is a method name (``"h3_fp8"``) or a mapping with a ``method`` and the keys of
:class:`H3QuantOptions`. Everything here is data; layers and kernels are not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from vllm_h3_quant.config import selector
from vllm_h3_quant.errors import H3QuantError, unknown


class Method(str, Enum):
    """Weight and activation format of the quantized linears."""

    FP8 = "h3_fp8"
    INT8 = "h3_int8"


METHODS: tuple[str, ...] = tuple(method.value for method in Method)

MAX_ROTATION = 512

NO_ATTENTION: Literal["none"] = "none"

EXPORT_FORMAT: Literal["vllm-h3-quant"] = "vllm-h3-quant"
"""What an exported model's configuration and files call their format."""


class H3QuantOptions(BaseModel):
    """One component's quantization.

    Attributes:
        method: ``h3_fp8`` (e4m3 codes) or ``h3_int8`` (symmetric codes); both with one fp32 scale
            per output channel of the weight and one per token of the activation.
        ignored_layers: linears to leave at checkpoint precision. An entry is a linear's name
            (``blocks.0.attn.qkv_proj``), a parent (``blocks.0.attn``) or an ``fnmatch`` pattern
            over either (``blocks.*.mlp.fc2``). An entry that matches nothing stops the start.
        adaln: ``quantize``; ``keep`` for bf16 on the device; ``host`` for bf16 in host memory, with outputs
            computed ahead of a request. The AdaLN projections are 40% of the DiT's bytes and a negligible part
            of its time.
        rotation: width of the Hadamard rotation of the input dimension before INT8 quantization,
            a power of two up to 512, or 0 for none. FP8 takes none.
        attention: ``none`` keeps the engine's attention in the DiT's blocks, ``int8`` and ``fp8`` replace
            it, ``auto`` takes the fastest that the GPU runs with an error that fits the method: FP8 linears
            accept more than INT8 ones.
        attention_skip_layers: DiT blocks that keep the engine's attention, a selector such as
            ``0-3,46-49`` or a list of indices.
        attention_skip_steps: denoising steps that keep it, in the same form, counted from 0.
        attention_token_refiner: whether the token refiner's attention is replaced too.
        fuse: whether the DiT's blocks write activations as codes where they are produced. The result is the same
            to the last bit.
        verify: whether every tensor's bytes are compared with the checkpoint's manifest while it is loaded.
        allow_unverified_curve: whether a pruned checkpoint is served whose curve nobody compared with the full
            weights.
        checkpoint: ``vllm-h3-quant`` in the configuration of an exported model: the checkpoint holds the codes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)

    method: Method
    ignored_layers: tuple[str, ...] = ()
    adaln: Literal["quantize", "keep", "host"] = "quantize"
    rotation: int = 0
    attention: Literal["none", "int8", "fp8", "auto"] = NO_ATTENTION
    attention_skip_layers: str = ""
    attention_skip_steps: str = ""
    attention_token_refiner: bool = False
    fuse: bool = True
    verify: bool = False
    allow_unverified_curve: bool = False
    checkpoint: Literal["", "vllm-h3-quant"] = ""

    @field_validator("ignored_layers", mode="before")
    @classmethod
    def _no_bare_string(cls, value: object) -> object:
        if isinstance(value, str):
            raise ValueError(f"expected a list of names, for example [{value!r}]")
        return () if value is None else value

    @field_validator("attention_skip_layers", "attention_skip_steps", mode="before")
    @classmethod
    def _canonical_selector(cls, value: object) -> str:
        return selector.canonical(value)

    @field_validator("rotation")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value < 0 or value > MAX_ROTATION or value & (value - 1) or value == 1:
            below = 1 << max(1, min(value, MAX_ROTATION).bit_length() - 1) if value > 0 else 0
            raise ValueError(f"expected 0 or a power of two from 2 to {MAX_ROTATION}, nearest is {below}")
        return value


PRESETS: dict[str, dict[str, Any]] = {
    "h3_fp8": {"method": Method.FP8},
    "h3_int8": {"method": Method.INT8, "rotation": 256},
    "h3_fp8_full": {"method": Method.FP8, "attention": "auto"},
    "h3_int8_full": {"method": Method.INT8, "rotation": 256, "attention": "auto"},
}
"""What a name alone stands for: a method and the keys that differ from their defaults."""

NAMES: tuple[str, ...] = tuple(PRESETS)
"""Every name that may be given as a method."""

KEYS: tuple[str, ...] = tuple(key for key in H3QuantOptions.model_fields if key != "method")


def parse(method: str, options: Mapping[str, Any] | None = None, *, where: str) -> H3QuantOptions:
    """Check a method name and its keys and freeze them.

    Args:
        method: a name of :data:`PRESETS`; ``-`` counts as ``_``, upper case as lower case.
        options: the keys beside the method; read only, never changed.
        where: where the configuration was given, for the error.

    Raises:
        H3QuantError: unknown method or key (with the nearest valid one), or a bad value.
    """
    name = str(method).lower().replace("-", "_")
    if name not in PRESETS:
        raise unknown("method", method, NAMES, where=where)
    given = dict(options or {})
    for key in given:
        if key not in KEYS:
            raise unknown(f"key of {name}", key, KEYS, where=where)
    if PRESETS[name]["method"] is Method.FP8 and given.get("rotation"):
        raise H3QuantError(
            f"{where}: rotation={given['rotation']!r} has no use with {name}; remove it or use {Method.INT8.value}"
        )
    try:
        parsed = H3QuantOptions(**{**PRESETS[name], **given})
    except ValidationError as error:
        raise _one_line(error, where) from None
    if parsed.attention == NO_ATTENTION:
        for key in ("attention_skip_layers", "attention_skip_steps", "attention_token_refiner"):
            if getattr(parsed, key):
                raise H3QuantError(
                    f"{where}: {key}={given[key]!r} has no use with attention='{NO_ATTENTION}'; remove it or set"
                    " attention to 'auto', 'int8' or 'fp8'"
                )
    return parsed


def _one_line(error: ValidationError, where: str) -> H3QuantError:
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"])
    reason = first["msg"].removeprefix("Value error, ")
    return H3QuantError(f"{where}: {key}={first['input']!r} is not valid: {reason}")
