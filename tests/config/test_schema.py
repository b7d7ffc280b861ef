"""Configuration: what is accepted, what is refused and with which words."""

from __future__ import annotations

import pytest

from vllm_h3_quant.config.schema import H3QuantOptions, Method, parse
from vllm_h3_quant.errors import H3QuantError


def test_presets() -> None:
    assert parse("h3_fp8", where="x").rotation == 0
    assert parse("h3_int8", where="x").rotation == 256
    assert parse("H3-FP8", where="x").method is Method.FP8
    assert parse("h3_fp8", where="x").attention == "none"


def test_fusion_is_on_unless_turned_off() -> None:
    assert parse("h3_int8", where="x").fuse
    assert not parse("h3_int8_full", {"fuse": False}, where="x").fuse
    with pytest.raises(H3QuantError, match="fuse='often' is not valid"):
        parse("h3_fp8", {"fuse": "often"}, where="x")


@pytest.mark.parametrize(("name", "plain"), [("h3_fp8_full", "h3_fp8"), ("H3-INT8-Full", "h3_int8")])
def test_presets_with_attention_are_the_method_with_auto(name: str, plain: str) -> None:
    assert parse(name, where="x") == parse(plain, {"attention": "auto"}, where="x")
    assert parse(name, {"attention": "fp8"}, where="x") == parse(plain, {"attention": "fp8"}, where="x")
    assert parse(name, {"attention": "none"}, where="x") == parse(plain, where="x")
    assert parse("h3_int8_full", {"rotation": 64}, where="x").rotation == 64


def test_selectors_are_kept_in_one_spelling() -> None:
    parsed = parse("h3_fp8_full", {"attention_skip_layers": [3, 1, 2, 9], "attention_skip_steps": "5, 0-4"}, where="x")
    assert parsed.attention_skip_layers == "1-3,9"
    assert parsed.attention_skip_steps == "0-5"
    assert parse("h3_fp8", {"attention_skip_layers": None, "attention_skip_steps": ""}, where="x") == parse(
        "h3_fp8", where="x"
    )


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("h3_fp8", {"ignored_layers": ["blocks.0.attn"], "adaln": "keep"}),
        ("h3_int8", {"rotation": 64, "ignored_layers": []}),
        ("h3_int8", {"rotation": 0}),
        ("h3_int8_full", {"attention_skip_layers": "0-3,46-49", "attention_skip_steps": [0], "attention": "int8"}),
        ("h3_fp8_full", {"attention_token_refiner": True}),
        ("h3_fp8", {"fuse": False}),
    ],
)
def test_json_round_trip(method: str, options: dict[str, object]) -> None:
    parsed = parse(method, options, where="x")
    assert H3QuantOptions.model_validate_json(parsed.model_dump_json()) == parsed


def test_frozen_and_caller_unchanged() -> None:
    layers = ["blocks.0"]
    given = {"ignored_layers": layers, "rotation": 32}
    parsed = parse("h3_int8", given, where="x")
    layers.append("blocks.1")
    assert parsed.ignored_layers == ("blocks.0",)
    assert given == {"ignored_layers": ["blocks.0", "blocks.1"], "rotation": 32}
    with pytest.raises(ValueError, match="frozen"):
        parsed.rotation = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("method", "options", "says"),
    [
        ("h3_fp9", {}, ["'h3_fp9'", "did you mean 'h3_fp8'", "h3_int8"]),
        ("fp8", {}, ["'fp8'", "h3_fp8"]),
        ("h3_fp8", {"ignored_layer": []}, ["'ignored_layer'", "did you mean 'ignored_layers'"]),
        ("h3_fp8", {"rotation": 256}, ["rotation=256", "h3_int8"]),
        ("h3_int8", {"rotation": 100}, ["rotation=100", "power of two", "nearest is 64"]),
        ("h3_int8", {"rotation": 1024}, ["rotation=1024", "nearest is 512"]),
        ("h3_int8", {"rotation": -8}, ["rotation=-8", "nearest is 0"]),
        ("h3_int8", {"rotation": 1}, ["rotation=1", "nearest is 2"]),
        ("h3_int8", {"rotation": "wide"}, ["rotation='wide'"]),
        ("h3_fp8", {"adaln": "hots"}, ["adaln='hots'", "quantize", "keep"]),
        ("h3_fp8", {"ignored_layers": "blocks.0"}, ["ignored_layers='blocks.0'", "list"]),
        ("h3_fp8_ful", {}, ["'h3_fp8_ful'", "did you mean 'h3_fp8_full'"]),
        ("h3_fp8_full", {"rotation": 256}, ["rotation=256", "h3_fp8_full", "h3_int8"]),
        ("h3_fp8", {"attention": "fp16"}, ["attention='fp16'", "'none', 'int8', 'fp8' or 'auto'"]),
        ("h3_fp8", {"attention_skip_step": "0"}, ["did you mean 'attention_skip_steps'"]),
        ("h3_fp8_full", {"attention_skip_steps": "0,9-4"}, ["attention_skip_steps='0,9-4'", "'9-4'", "'0-3,46-49'"]),
        ("h3_fp8_full", {"attention_skip_layers": "first"}, ["'first' is no index or range", "'0-3,46-49'"]),
        ("h3_fp8_full", {"attention_skip_layers": 3}, ["attention_skip_layers=3", "list of indices"]),
        ("h3_fp8", {"attention_skip_layers": "0"}, ["attention_skip_layers='0' has no use with attention='none'"]),
        ("h3_int8", {"attention_skip_steps": [1]}, ["attention_skip_steps=[1] has no use", "'auto'"]),
        ("h3_fp8", {"attention_token_refiner": True}, ["attention_token_refiner=True has no use"]),
    ],
)
def test_refusals_are_one_line_and_name_the_value(method: str, options: dict[str, object], says: list[str]) -> None:
    with pytest.raises(H3QuantError) as caught:
        parse(method, options, where="component 'transformer'")
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("component 'transformer'")
    assert all(part in message for part in says), message


def test_the_widest_rotation_is_the_kernels() -> None:
    """The configuration knows no kernels, so it holds a number of its own."""
    from vllm_h3_quant.config.schema import MAX_ROTATION
    from vllm_h3_quant.kernels.hadamard import MAX_GROUP

    assert MAX_ROTATION == MAX_GROUP
