"""A symbol that moved stops the start with its name and both versions."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version

import pytest

from vllm_h3_quant.engine.quant_config import build, check_upstream
from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.plugin import register
from vllm_h3_quant.upstream import attention, cpu_linear, factory, lora, model_loader, preflight, sdpa

SYMBOLS = tuple(
    symbol for part in (factory, model_loader, lora, attention, cpu_linear, sdpa) for symbol in part.SYMBOLS
)

register()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    check_upstream.cache_clear()
    yield
    check_upstream.cache_clear()


@pytest.mark.parametrize("symbol", SYMBOLS, ids=lambda symbol: symbol.path)
def test_installed_versions_have_every_symbol(symbol: preflight.Symbol) -> None:
    assert preflight.problem(symbol) is None


def test_a_symbol_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_omni.diffusion.model_loader.diffusers_loader import DiffusersPipelineLoader

    monkeypatch.delattr(DiffusersPipelineLoader, "load_weights")
    with pytest.raises(H3QuantError) as caught:
        build("h3_fp8", where="test")
    message = str(caught.value)
    assert "diffusers_loader.DiffusersPipelineLoader.load_weights is gone" in message
    assert f"vllm-omni {version('vllm-omni')}" in message
    assert "supports vllm-omni 0.30" in message
    assert "\n" not in message


def test_a_parameter_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_omni.quantization import factory as upstream_factory

    monkeypatch.setattr(upstream_factory, "_build_single", lambda name: None)
    with pytest.raises(H3QuantError, match="_build_single takes no method, kwargs any more"):
        check_upstream()


def test_other_models_start_when_a_symbol_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_omni.quantization import build_quant_config
    from vllm_omni.quantization import factory as upstream_factory

    monkeypatch.setattr(factory, "_installed", False)
    monkeypatch.delattr(upstream_factory, "_build_component_config")
    register()
    assert build_quant_config("fp8").get_name() == "fp8"
    with pytest.raises(H3QuantError, match="_build_component_config is gone"):
        build_quant_config("h3_fp8")


def test_the_engines_own_methods_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_omni.quantization import build_quant_config

    monkeypatch.setattr(factory, "SYMBOLS", (preflight.Symbol("vllm", "vllm.nowhere", "nothing"),))
    assert build_quant_config("fp8").get_name() == "fp8"
    with pytest.raises(H3QuantError, match=r"vllm\.nowhere\.nothing is gone"):
        build_quant_config("h3_fp8")
