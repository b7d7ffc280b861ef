"""Method names: this package's own, and the engine's where the user routes them here.

``VLLM_H3_QUANT_REPLACE=fp8,int8`` serves the engine's plain names with this package, so that a
command written for the engine runs unchanged. Without it they stay the engine's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from vllm_h3_quant.config.schema import NAMES, Method
from vllm_h3_quant.errors import H3QuantError, unknown

REPLACE_VARIABLE = "VLLM_H3_QUANT_REPLACE"
REPLACEABLE: dict[str, Method] = {"fp8": Method.FP8, "int8": Method.INT8}

_IMPLIED: dict[str, object] = {
    "activation_scheme": "dynamic",
    "is_checkpoint_fp8_serialized": False,
    "is_checkpoint_int8_serialized": False,
}
"""Keys of the engine's methods that say what this package does anyway, with the value that does."""


def normalize(name: str) -> str:
    """Lower case with underscores, as the engine looks names up."""
    return name.lower().replace("-", "_")


def replaced() -> dict[str, Method]:
    """The engine's names that are routed here, from the environment.

    Raises:
        H3QuantError: a name that cannot be routed.
    """
    given = [normalize(part.strip()) for part in os.environ.get(REPLACE_VARIABLE, "").split(",") if part.strip()]
    for name in given:
        if name not in REPLACEABLE:
            raise unknown("method", name, REPLACEABLE, where=REPLACE_VARIABLE)
    return {name: REPLACEABLE[name] for name in given}


def looks_ours(name: str | None) -> bool:
    """Whether a name is this package's, is routed here, or is most likely a misspelt one of ours."""
    return name is not None and (normalize(name).startswith("h3") or normalize(name) in replaced())


def method_of(value: object) -> str | None:
    """The method name in a component's value: a name, or a mapping with ``method``."""
    if isinstance(value, Mapping):
        value = value.get("method", value.get("quant_method"))
    return value if isinstance(value, str) else None


def claims_components(spec: Mapping[str, Any]) -> bool:
    """Whether a mapping is by component and names at least one method of this package."""
    if "method" in spec or "quant_method" in spec:
        return False
    return any(looks_ours(method_of(value)) for value in spec.values())


def served() -> tuple[str, ...]:
    """Every name that this package registers in this process."""
    return (*NAMES, *replaced())


def translate(name: str, options: Mapping[str, Any], *, where: str) -> tuple[str, dict[str, Any]]:
    """The method and keys that a name given by the user stands for.

    Raises:
        H3QuantError: a key of the engine's method whose value this package does not do.
    """
    method = replaced().get(normalize(name))
    if method is None:
        return normalize(name), dict(options)
    kept = {}
    for key, value in options.items():
        if key not in _IMPLIED:
            kept[key] = value
        elif value != _IMPLIED[key]:
            raise H3QuantError(
                f"{where}: {REPLACE_VARIABLE} routes {name!r} to {method.value}, which has no {key}={value!r};"
                f" use {_IMPLIED[key]!r} or unset {REPLACE_VARIABLE}"
            )
    return method.value, kept
