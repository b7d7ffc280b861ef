"""Plain engine names routed to this package, and left alone otherwise."""

from __future__ import annotations

from typing import Any

import pytest
from vllm_omni.quantization import build_quant_config

from vllm_h3_quant.config import names
from vllm_h3_quant.engine.quant_config import H3QuantConfig
from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.plugin import register

register()


def test_plain_names_stay_upstreams_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(names.REPLACE_VARIABLE, raising=False)
    for name in ("fp8", "int8"):
        assert not isinstance(build_quant_config(name), H3QuantConfig)


@pytest.mark.parametrize(("plain", "ours"), [("fp8", "h3_fp8"), ("int8", "h3_int8"), ("FP8", "h3_fp8")])
def test_replaced_names(monkeypatch: pytest.MonkeyPatch, plain: str, ours: str) -> None:
    monkeypatch.setenv(names.REPLACE_VARIABLE, "fp8, int8")
    spec: Any
    for spec in (plain, {"method": plain, "activation_scheme": "dynamic", "ignored_layers": []}):
        config = build_quant_config(spec)
        assert isinstance(config, H3QuantConfig)
        assert config.get_name() == ours
    assert build_quant_config({"transformer": plain, "text_encoder": plain}).resolve("transformer").get_name() == ours


@pytest.mark.parametrize("name", ["h3_fp8_full", "h3_int8_full", "H3-INT8-full"])
def test_presets_are_names_like_the_methods(name: str) -> None:
    for spec in (name, {"method": name}, {"quant_method": name}):
        config = build_quant_config(spec)
        assert isinstance(config, H3QuantConfig)
        assert config.options.attention == "auto"
        assert config.get_name() == names.normalize(name).removesuffix("_full")
    by_component = build_quant_config({"transformer": name, "text_encoder": None})
    assert by_component.resolve("transformer").options == config.options


def test_the_checkpoint_may_name_a_preset() -> None:
    assert H3QuantConfig.from_config({"quant_method": "h3_fp8_full"}).options.attention == "auto"


def test_only_the_named_one_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(names.REPLACE_VARIABLE, "int8")
    assert not isinstance(build_quant_config("fp8"), H3QuantConfig)


def test_what_the_method_does_not_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(names.REPLACE_VARIABLE, "fp8")
    with pytest.raises(H3QuantError, match=r"activation_scheme='static'.*unset VLLM_H3_QUANT_REPLACE"):
        build_quant_config({"method": "fp8", "activation_scheme": "static"})


def test_a_name_that_cannot_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(names.REPLACE_VARIABLE, "fp8,int4")
    with pytest.raises(H3QuantError, match=r"'int4'.*did you mean 'int8'"):
        register()
