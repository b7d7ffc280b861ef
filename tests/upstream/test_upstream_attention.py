"""The patch point in the engine's attention layer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_h3_quant.engine.quant_config import build, check_upstream
from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.upstream.attention import MODEL_CLASSES, decision_of, install, layers


@pytest.fixture(autouse=True)
def restore(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_omni.diffusion.attention.layer import Attention

    monkeypatch.setattr(Attention, "_init_kv_cache_quantization", Attention._init_kv_cache_quantization)


def layer(decide: Any, carry_out: Any = lambda built, decision: None, **config: Any) -> Any:
    """An attention layer without its constructor, at the statement that is patched."""
    from vllm_omni.diffusion.attention.layer import Attention

    install(decide, carry_out)
    built = Attention.__new__(Attention)
    torch.nn.Module.__init__(built)
    built.attention = SimpleNamespace(supports_kv_cache_dtype=lambda dtype, platform: False)
    built.attn_backend = SimpleNamespace(get_name=lambda: "some backend")
    built.layer_idx, built._disable_kv_quant = 0, False
    built._init_kv_cache_quantization(SimpleNamespace(**{"model_class_name": MODEL_CLASSES[0], **config}))
    return built


def test_a_second_installation_replaces_the_first() -> None:
    asked: list[str] = []
    install(lambda built, config: asked.append("first"), lambda built, decision: None)
    layer(lambda built, config: asked.append("second"))
    assert asked == ["second"]


def test_an_implementation_is_put_in_and_asked_for_its_dtypes() -> None:
    ours = SimpleNamespace(supports_kv_cache_dtype=lambda dtype, platform: dtype == "fp8")
    decision = object()
    carried_out: list[Any] = []

    def carry_out(built: Any, decided: Any) -> Any:
        carried_out.append(decided)
        return ours

    built = layer(lambda built, config: decision, carry_out, diffusion_kv_cache_dtype="fp8")
    assert built.attention is ours
    assert decision_of(built) is decision
    assert carried_out == [decision]
    assert list(layers(torch.nn.ModuleDict({"attn": built}))) == [("attn", built)]


def test_a_layer_that_is_kept_takes_the_dtype_of_the_others() -> None:
    built = layer(lambda built, config: object(), diffusion_kv_cache_dtype="fp8")
    assert built._kv_cache_dtype == "fp8"


def test_a_layer_that_nobody_asked_about_is_upstreams() -> None:
    with pytest.raises(ValueError, match="some backend does not support kv_cache_dtype='fp8'"):
        layer(lambda built, config: None, diffusion_kv_cache_dtype="fp8")


def test_other_models_are_not_asked_about() -> None:
    def decide(built: Any, config: Any) -> None:
        pytest.fail("asked")

    built = layer(decide, model_class_name="WanPipeline")
    assert decision_of(built) is None


def test_a_symbol_that_moved_stops_our_configurations(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_omni.diffusion.attention.layer import Attention

    check_upstream.cache_clear()
    monkeypatch.delattr(Attention, "_init_kv_cache_quantization")
    with pytest.raises(H3QuantError, match=r"layer\.Attention\._init_kv_cache_quantization is gone"):
        build("h3_fp8", where="test")
    check_upstream.cache_clear()


def test_a_symbol_that_moved_leaves_other_models_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_omni.diffusion.attention.layer import Attention

    from vllm_h3_quant.plugin import register_general

    monkeypatch.delenv("VLLM_H3_QUANT_REPORT", raising=False)
    before = Attention._init_kv_cache_quantization
    monkeypatch.delattr(Attention, "_with_kv_cache_dtype")
    register_general()
    assert Attention._init_kv_cache_quantization is before
