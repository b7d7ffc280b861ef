"""The pipeline's components, the keys that each can use, and the one reading of what a user gives.

A value is a method's name, a mapping with ``method``, or a mapping from component to either of them or null. Serving
and export read it here, so that they take and refuse the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_h3_quant.config import names
from vllm_h3_quant.config.schema import KEYS, NO_ATTENTION, H3QuantOptions, parse
from vllm_h3_quant.errors import H3QuantError, nearest, unknown

TRANSFORMER = "transformer"
TEXT_ENCODER = "text_encoder"
COMPONENTS: tuple[str, ...] = (TRANSFORMER, TEXT_ENCODER)
"""What can be quantized."""

DEFAULT = "default"
"""Stands for every component that has no value of its own."""

_VAE = "remote code of the checkpoint, convolutions, run once a request"
UNREACHED_COMPONENTS: dict[str, str] = {"vae": _VAE, "video_vae": _VAE, "audio_vae": _VAE}
"""Components of the pipeline that hold no vLLM linear, and why they stay as they are."""

USABLE: dict[str, tuple[str, ...]] = {
    TRANSFORMER: KEYS,
    # No AdaLN, no curve, no block of the DiT and no attention layer that is replaced.
    TEXT_ENCODER: ("ignored_layers", "rotation", "verify", "checkpoint"),
}
"""Keys beside ``method`` that do something in a component."""


@dataclass(frozen=True)
class Part:
    """One value that was given, and the components that it reaches.

    Attributes:
        key: the component or :data:`DEFAULT`; empty for a value without components.
        components: names of :data:`COMPONENTS`.
        options: of a method of this package.
        other: ``method`` and keys of one of the engine's own methods. Neither where a component is left as it is.
        where: where it was given, for errors.
        name: the method's name as it was given.
    """

    key: str
    components: tuple[str, ...]
    options: H3QuantOptions | None
    other: Mapping[str, Any] | None
    where: str
    name: str = ""


def parse_parts(spec: object, *, where: str) -> tuple[Part, ...]:
    """Read what a user gave.

    Args:
        spec: a method's name, a mapping with ``method``, or a mapping by component; read only.
        where: where it was given, for errors.

    Raises:
        H3QuantError: an unknown component, method or key, a bad value, a key or a preset's attention that no component
            of the value can use, a component that cannot be quantized, or no method at all.
    """
    if not isinstance(spec, Mapping) or "method" in spec or "quant_method" in spec:
        return (_part("", COMPONENTS, spec, where),)
    for component in spec:
        if component not in (*COMPONENTS, DEFAULT, *UNREACHED_COMPONENTS):
            raise unknown("component", component, (*COMPONENTS, DEFAULT), where=where)
    parts = []
    for key, value in spec.items():
        told = f"{where}, component {key!r}"
        if value is None:
            parts.append(Part(key, _reached(key, spec), None, None, told))
        elif key in UNREACHED_COMPONENTS:
            raise H3QuantError(
                f"{told}: cannot be quantized ({UNREACHED_COMPONENTS[key]}); set it to null or quantize"
                f" {' or '.join(COMPONENTS)}"
            )
        else:
            parts.append(_part(key, _reached(key, spec), value, told))
    if all(part.options is None and part.other is None for part in parts):
        raise H3QuantError(f"{where}: names no method, so there is nothing to quantize")
    return tuple(parts)


def read_method(method: str, keys: Mapping[str, Any], *, where: str) -> H3QuantOptions:
    """The options in a name that is served by this package and the keys beside it.

    Raises:
        H3QuantError: an unknown name or key, or a bad value.
    """
    name, translated = names.translate(method, keys, where=where)
    return parse(name, translated, where=where)


def _reached(key: str, spec: Mapping[str, Any]) -> tuple[str, ...]:
    if key == DEFAULT:
        return tuple(name for name in COMPONENTS if name not in spec)
    return (key,) if key in COMPONENTS else ()


def _part(key: str, components: tuple[str, ...], value: object, where: str) -> Part:
    method = names.method_of(value)
    if method is None:
        null = ", or null" if key else ""
        raise H3QuantError(f"{where}: {value!r} is not a method name or a mapping with 'method'{null}")
    keys = dict(value) if isinstance(value, Mapping) else {}
    # Only one of the two: a second one is then an unknown key.
    keys.pop("method" if "method" in keys else "quant_method", None)
    if key and not components:
        raise H3QuantError(f"{where}: {method!r} reaches nothing, every component has a value of its own; remove it")
    if key and not names.looks_ours(method):
        return Part(key, components, None, {"method": method, **keys}, where, method)
    options = read_method(method, keys, where=where)
    # An export writes what it was asked for, and it is read as it was written.
    if not options.checkpoint:
        _refuse_unusable(key, components, keys, options, where)
    return Part(key, components, options, None, where, method)


def _refuse_unusable(
    key: str, components: tuple[str, ...], given: Mapping[str, Any], options: H3QuantOptions, where: str
) -> None:
    if TRANSFORMER in components:
        return
    valid = tuple(name for name in KEYS if any(name in USABLE[component] for component in components))
    for name, value in given.items():
        if name in KEYS and name not in valid:
            close = nearest(name, valid)
            hint = f"; did you mean {close!r}?" if close else "; remove it;"
            raise H3QuantError(
                f"{where}: {name}={value!r} is for the layers of {TRANSFORMER!r}, which {key!r} does not reach here"
                f"{hint} valid: {', '.join(valid)}"
            )
    if options.attention != NO_ATTENTION:
        raise H3QuantError(
            f"{where}: attention={options.attention!r} is for the layers of {TRANSFORMER!r}, which {key!r} does not"
            f" reach here; write {options.method.value!r}"
        )
