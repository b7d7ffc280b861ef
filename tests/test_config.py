"""Configuration: what is accepted, what is refused and with which words."""

from __future__ import annotations

import pytest

from vllm_h3_quant.config import H3QuantOptions, Method, parse
from vllm_h3_quant.errors import H3QuantError


def test_presets() -> None:
    assert parse("h3_fp8", where="x").rotation == 0
    assert parse("h3_int8", where="x").rotation == 256
    assert parse("H3-FP8", where="x").method is Method.FP8


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("h3_fp8", {"ignored_layers": ["blocks.0.attn"], "adaln": "keep"}),
        ("h3_int8", {"rotation": 64, "ignored_layers": []}),
        ("h3_int8", {"rotation": 0}),
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
    from vllm_h3_quant.config import MAX_ROTATION
    from vllm_h3_quant.kernels.hadamard import MAX_GROUP

    assert MAX_ROTATION == MAX_GROUP
