"""One parser from what a user gives to options by component, and which keys a component can use."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from vllm_h3_quant.config.components import COMPONENTS, TEXT_ENCODER, TRANSFORMER, USABLE, Part, parse_parts
from vllm_h3_quant.config.schema import KEYS
from vllm_h3_quant.errors import H3QuantError

EXPORT = {"checkpoint": "vllm-h3-quant"}


def by_component(parts: tuple[Part, ...]) -> dict[str, str | None]:
    """The method of each component; None where it is left as it is."""
    found: dict[str, str | None] = dict.fromkeys(COMPONENTS)
    for part in parts:
        for name in part.components:
            found[name] = part.options.method.value if part.options else part.other and part.other["method"]
    return found


@pytest.mark.parametrize(
    ("spec", "transformer", "text_encoder"),
    [
        ("h3_fp8", "h3_fp8", "h3_fp8"),
        ("H3-INT8", "h3_int8", "h3_int8"),
        ({"method": "h3_fp8_full", "fuse": False, "adaln": "keep"}, "h3_fp8", "h3_fp8"),
        ({"quant_method": "h3_int8"}, "h3_int8", "h3_int8"),
        ({"transformer": "h3_fp8"}, "h3_fp8", None),
        ({"transformer": None, "text_encoder": {"quant_method": "h3_int8", "rotation": 64}}, None, "h3_int8"),
        ({"default": "h3_fp8_full"}, "h3_fp8", "h3_fp8"),
        ({"default": {"method": "h3_fp8", "fuse": False}, "text_encoder": None}, "h3_fp8", None),
        ({"default": None, "transformer": "h3_fp8"}, "h3_fp8", None),
        ({"transformer": "h3_fp8", "default": {"method": "h3_int8", "verify": True}, "vae": None}, "h3_fp8", "h3_int8"),
        ({"transformer": "h3_fp8", "text_encoder": "fp8"}, "h3_fp8", "fp8"),
    ],
    ids=str,
)
def test_forms(spec: Any, transformer: str | None, text_encoder: str | None) -> None:
    before = copy.deepcopy(spec)
    assert by_component(parse_parts(spec, where="test")) == {TRANSFORMER: transformer, TEXT_ENCODER: text_encoder}
    assert spec == before


def test_every_key_is_of_some_component() -> None:
    assert set(USABLE[TRANSFORMER]) == set(KEYS)
    assert set(USABLE[TEXT_ENCODER]) == {"ignored_layers", "rotation", "verify", "checkpoint"}


UNUSABLE = {
    "adaln": "quantize",
    "attention": "none",
    "attention_skip_layers": "",
    "attention_skip_steps": "",
    "attention_token_refiner": False,
    "fuse": True,
    "allow_unverified_curve": True,
}


def test_every_other_key_is_tried_below() -> None:
    assert set(UNUSABLE) == set(USABLE[TRANSFORMER]) - set(USABLE[TEXT_ENCODER])


@pytest.mark.parametrize("key", UNUSABLE)
@pytest.mark.parametrize(
    ("spec", "component"),
    [
        ({"text_encoder": {"method": "h3_int8"}}, "text_encoder"),
        ({"transformer": "h3_fp8", "text_encoder": {"method": "h3_int8"}}, "text_encoder"),
        ({"transformer": None, "default": {"method": "h3_int8"}}, "default"),
    ],
    ids=["alone", "beside", "default"],
)
def test_a_key_that_a_component_cannot_use(spec: dict[str, Any], component: str, key: str) -> None:
    """A default that was written down, too: whoever wrote it expects it to do something."""
    spec = {**spec, component: {**spec[component], key: UNUSABLE[key]}}
    with pytest.raises(H3QuantError) as caught:
        parse_parts(spec, where="test")
    message = str(caught.value)
    assert message.startswith(f"test, component {component!r}: {key}={UNUSABLE[key]!r} "), message
    assert "'transformer'" in message
    assert message.endswith("ignored_layers, rotation, verify, checkpoint"), message
    assert "\n" not in message


@pytest.mark.parametrize("key", UNUSABLE)
def test_the_same_key_where_the_transformer_is_reached(key: str) -> None:
    options = {"method": "h3_int8", key: UNUSABLE[key]}
    for spec in (options, {"default": options}, {"transformer": options}):
        assert parse_parts(spec, where="test")


def test_what_an_export_wrote_is_read_as_it_is() -> None:
    options = {"method": "h3_int8", "fuse": False, "adaln": "keep", **EXPORT}
    (part,) = parse_parts({"text_encoder": options}, where="test")
    assert part.options is not None
    assert part.options.checkpoint


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"text_encoder": {"method": "h3_int8", "rotatoin": 64}}, "unknown key of h3_int8 'rotatoin'; did you mean"),
        ({"text_encoder": "h3_int8_full"}, "attention='auto' is for the layers of 'transformer'.*; write 'h3_int8'$"),
        ({"transformer": "h3_fp8", "default": "h3_fp8_full"}, "component 'default': attention='auto'.*'h3_fp8'$"),
        (
            {"transformer": "h3_fp8", "text_encoder": "h3_fp8", "default": "h3_int8"},
            "component 'default': .*every component has a value of its own; remove it",
        ),
        ({"transfomer": "h3_fp8"}, "unknown component 'transfomer'; did you mean 'transformer'"),
        ({"vae": "h3_fp8"}, "component 'vae': cannot be quantized"),
        ({"transformer": 7}, "component 'transformer': 7 is not a method name or a mapping with 'method', or null"),
        ({"transformer": {"rotation": 4}}, "component 'transformer': .*'method'"),
        (7, "7 is not a method name or a mapping with 'method'$"),
        ({"method": 7}, "not a method name"),
        ({"method": "h3_fp8", "quant_method": "h3_int8"}, "unknown key of h3_fp8 'quant_method'"),
        ({}, "names no method"),
    ],
    ids=str,
)
def test_refusals(spec: Any, says: str) -> None:
    with pytest.raises(H3QuantError, match=says) as caught:
        parse_parts(spec, where="test")
    assert "\n" not in str(caught.value)
