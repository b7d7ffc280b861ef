"""What was asked of attention, by this package's keys and by the engine's option. No device takes part."""

from __future__ import annotations

import pytest

from vllm_h3_quant.attention.request import AttentionRequest, combine
from vllm_h3_quant.config.schema import H3QuantOptions, Method, parse
from vllm_h3_quant.errors import H3QuantError

ENGINES = frozenset({2})


def options(**keys: object) -> H3QuantOptions:
    return parse("h3_int8", keys, where="test")


@pytest.mark.parametrize("engines", [None, "auto", "float", "mxfp8"])
def test_nothing(engines: str | None) -> None:
    assert combine(None, engines) is None
    assert combine(options(), engines) is None


@pytest.mark.parametrize("ours", [None, options()])
def test_the_engines_option_alone(ours: H3QuantOptions | None) -> None:
    assert combine(ours, "fp8", ENGINES) == AttentionRequest(
        "diffusion_kv_cache_dtype='fp8'", "fp8", skipped_blocks=ENGINES, by_engine_option=True
    )


@pytest.mark.parametrize("engines", [None, "auto"])
def test_ours_alone_takes_nothing_of_the_engines(engines: str | None) -> None:
    keys = {"attention_skip_layers": "0-1", "attention_skip_steps": "4", "attention_token_refiner": True}
    blocks = frozenset({0, 1})
    assert combine(options(attention="auto", **keys), engines, ENGINES) == AttentionRequest(
        "attention='auto'", "auto", Method.INT8, blocks, blocks, frozenset({4}), token_refiner=True
    )


def test_both_for_the_same_thing() -> None:
    request = combine(options(attention="fp8", attention_skip_layers="0"), "fp8", ENGINES)
    assert request is not None
    assert (request.source, request.by_engine_option) == ("attention='fp8'", True)
    assert (request.named_blocks, request.skipped_blocks) == ({0}, {0, 2})


@pytest.mark.parametrize("engines", ["int8", "float", "mxfp8"])
def test_both_for_different_things(engines: str) -> None:
    with pytest.raises(H3QuantError, match=f"diffusion_kv_cache_dtype='{engines}' and attention='fp8'.*leave one"):
        combine(options(attention="fp8"), engines)
