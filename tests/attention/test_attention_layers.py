"""Which of the engine's layers are replaced: built by the engine's own constructor."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_config import od_config
from vllm_omni.quantization import build_quant_config

from vllm_h3_quant.attention import layers
from vllm_h3_quant.attention.decision import NOT_ASKED, SKIPPED, LayerFacts
from vllm_h3_quant.attention.facts import layer_facts
from vllm_h3_quant.attention.implementation import QuantizedAttention
from vllm_h3_quant.attention.layers import check, decision_of
from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.plugin import register

register()

Build = Callable[..., Any]
REFINER = "token_refiner.blocks.0.attn"


def kind_of(layer: Any) -> str | None:
    return layer.attention.kind if isinstance(layer.attention, QuantizedAttention) else None


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        (None, None),
        ("h3_fp8", None),
        ({"method": "h3_fp8", "attention": "int8"}, "int8"),
        ({"method": "h3_int8", "attention": "fp8"}, "fp8"),
        ({"transformer": {"method": "h3_int8", "attention": "fp8"}, "text_encoder": "h3_fp8"}, "fp8"),
        ({"default": {"method": "h3_int8", "attention": "fp8"}, "text_encoder": None}, "fp8"),
        ({"transformer": None, "text_encoder": "h3_fp8"}, None),
        ({"method": "h3_fp8_full", "attention": "none"}, None),
    ],
)
def test_the_transformers_configuration_decides(build_layer: Build, spec: Any, kind: str | None) -> None:
    layer = build_layer(od_config(spec and build_quant_config(spec)))
    assert kind_of(layer) == kind
    assert (decision_of(layer) is None) == (kind is None)


@pytest.mark.parametrize("name", ["h3_fp8_full", "h3_int8_full"])
def test_presets_take_what_auto_chooses(build_layer: Build, name: str) -> None:
    layer = build_layer(od_config(build_quant_config(name)))
    decision = decision_of(layer)
    assert decision is not None
    assert kind_of(layer) is not None
    assert decision.why


def test_selected_layers_and_the_token_refiner_keep_the_engines(build_layer: Build) -> None:
    options = {"method": "h3_fp8", "attention": "int8", "attention_skip_layers": "0,2-3"}
    config = od_config(build_quant_config(options))
    prefixes = [*(f"blocks.{index}.attn" for index in range(5)), REFINER, "vae.attn"]
    built = [build_layer(config, prefix) for prefix in prefixes]
    assert [kind_of(layer) for layer in built] == [None, "int8", None, None, "int8", None, None]
    reasons = [decision.reason if (decision := decision_of(layer)) else None for layer in built]
    asked = "attention='int8'"
    assert reasons == [SKIPPED, asked, SKIPPED, SKIPPED, asked, NOT_ASKED, None]


def test_the_token_refiner_when_asked(build_layer: Build) -> None:
    """Its blocks are not those of the selector."""
    options = {"attention": "int8", "attention_token_refiner": True, "attention_skip_layers": [0]}
    config = od_config(build_quant_config({"method": "h3_fp8", **options}))
    assert kind_of(build_layer(config, REFINER)) == "int8"


class TestEngineOption:
    @pytest.mark.parametrize("dtype", ["int8", "fp8"])
    def test_is_honoured_without_a_configuration_of_ours(self, build_layer: Build, dtype: str) -> None:
        config = od_config(diffusion_kv_cache_dtype=dtype, diffusion_kv_cache_skip_layer_indices={0})
        layer = build_layer(config)
        assert kind_of(layer) == dtype
        assert layer._kv_cache_dtype == dtype
        assert kind_of(build_layer(config, "blocks.0.attn")) is None
        assert kind_of(build_layer(config, REFINER)) is None

    def test_is_honoured_beside_a_configuration_that_says_nothing(self, build_layer: Build) -> None:
        config = od_config(build_quant_config("h3_fp8"), diffusion_kv_cache_dtype="int8")
        assert kind_of(build_layer(config)) == "int8"

    def test_both_may_say_the_same(self, build_layer: Build) -> None:
        options = {"method": "h3_fp8", "attention": "fp8", "attention_skip_layers": "0"}
        config = od_config(
            build_quant_config(options),
            diffusion_kv_cache_dtype="fp8",
            diffusion_kv_cache_skip_layer_indices={2},
        )
        assert [kind_of(build_layer(config, f"blocks.{i}.attn")) for i in range(3)] == [None, "fp8", None]

    def test_both_may_not_differ(self, build_layer: Build) -> None:
        config = od_config(
            build_quant_config({"method": "h3_fp8", "attention": "fp8"}), diffusion_kv_cache_dtype="int8"
        )
        with pytest.raises(H3QuantError, match=r"diffusion_kv_cache_dtype='int8' and attention='fp8'.*leave one"):
            build_layer(config)

    def test_elsewhere_it_is_the_engines(self, build_layer: Build, monkeypatch: pytest.MonkeyPatch) -> None:
        """As on Ascend, whose kernels are upstream's: the layer and the check of the model stay out of it."""
        monkeypatch.setattr(layers, "is_served_platform", lambda: False)
        config = od_config(diffusion_kv_cache_dtype="fp8")
        with pytest.raises(ValueError, match="does not support kv_cache_dtype='fp8'"):
            build_layer(config)
        check(config, torch.nn.Module())

    @pytest.mark.parametrize("model", ["WanPipeline", "QwenImagePipeline", None])
    def test_other_models_refuse_as_ever(self, build_layer: Build, model: str | None) -> None:
        with pytest.raises(ValueError, match="does not support kv_cache_dtype='fp8'"):
            build_layer(od_config(model_class_name=model, diffusion_kv_cache_dtype="fp8"))

    def test_other_dtypes_are_refused_as_ever(self, build_layer: Build) -> None:
        with pytest.raises(ValueError, match="does not support kv_cache_dtype='mxfp8'"):
            build_layer(od_config(diffusion_kv_cache_dtype="mxfp8"))

    def test_what_a_layer_cannot_do_is_refused(self, build_layer: Build) -> None:
        with pytest.raises(H3QuantError, match="diffusion_kv_cache_dtype='int8' cannot be served: causal"):
            build_layer(od_config(diffusion_kv_cache_dtype="int8"), causal=True)

    def test_the_engines_step_selector_reaches_the_call(
        self, build_layer: Build, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from vllm_omni.diffusion.attention.backends.abstract import AttentionMetadata
        from vllm_omni.diffusion.forward_context import ForwardContext, override_forward_context

        from vllm_h3_quant.attention.implementation import kernels

        monkeypatch.setattr(kernels, "attend", lambda query, *args, **more: torch.full_like(query, 7))
        layer = build_layer(od_config(diffusion_kv_cache_dtype="int8", diffusion_kv_cache_skip_step_indices={1}))
        ends = torch.tensor([0, 6], dtype=torch.int32)
        lengths = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 6, "max_seqlen_k": 6}
        q = torch.zeros(1, 6, 2, 64, dtype=torch.bfloat16)
        parallel = SimpleNamespace(parallel_config=SimpleNamespace(sequence_parallel_size=1))
        got = {}
        for step in (0, 1):
            context = ForwardContext(omni_diffusion_config=parallel, denoise_step_idx=step)  # type: ignore[arg-type]
            with override_forward_context(context):
                got[step] = layer(q, q, q, AttentionMetadata(extra=dict(lengths))).max().item()
        assert got == {0: 7, 1: 0}


def test_other_models_are_left_alone(build_layer: Build) -> None:
    config = od_config(build_quant_config({"method": "h3_fp8", "attention": "int8"}), model_class_name="WanPipeline")
    assert kind_of(build_layer(config)) is None


def test_h3_under_its_released_name(build_layer: Build) -> None:
    config = od_config(
        build_quant_config({"method": "h3_fp8", "attention": "int8"}), model_class_name="MiniMaxH3ModularPipeline"
    )
    assert kind_of(build_layer(config)) == "int8"


class Backend:
    """Stands for a backend class of the engine."""

    def __init__(self, name: str) -> None:
        self.name = name

    def get_name(self) -> str:
        return self.name


def layer(backend: str = "FLASH_ATTN", options: dict[str, Any] | None = None, **changes: Any) -> Any:
    spec = None if options is None else SimpleNamespace(backend_kwargs=lambda: options)
    plain = {"prefix": "blocks.1.attn", "skip_sequence_parallel": False, "causal": False, "num_heads": 4}
    plain |= {"num_kv_heads": 4, "head_size": 128}
    return SimpleNamespace(**{**plain, **changes}, attn_backend=Backend(backend), attn_spec=spec)


def facts(layer: Any, parallel: dict[str, int] | None = None) -> LayerFacts:
    found = layer_facts(layer, od_config(parallel=parallel or {}).parallel_config)
    assert found is not None
    return found


class TestFacts:
    """What is read of a layer."""

    @pytest.mark.parametrize(
        ("prefix", "block"), [("blocks.0.attn", 0), ("blocks.49.attn", 49), ("token_refiner.blocks.1.attn", None)]
    )
    def test_place(self, prefix: str, block: int | None) -> None:
        assert facts(layer(prefix=prefix)).block == block

    @pytest.mark.parametrize("prefix", ["vae.attn", "vae.blocks.0.attn", "blocks.0.attn.x", "blocks.attn", ""])
    def test_places_that_are_not_asked_about(self, prefix: str) -> None:
        assert layer_facts(layer(prefix=prefix), od_config().parallel_config) is None

    def test_all_of_them(self) -> None:
        assert facts(layer()) == LayerFacts(1, 4, 4, 128, causal=False, backend="FLASH_ATTN")
        assert facts(layer("TRTLLM_ATTN", {"target_sparsity": 0.5}, num_kv_heads=2, causal=True)) == LayerFacts(
            1, 4, 2, 128, causal=True, backend="TRTLLM_ATTN", backend_options=True
        )
        assert not facts(layer("CUDNN_ATTN", {})).backend_options

    @pytest.mark.parametrize(("degree", "field"), [("ring_degree", "ring"), ("allgather_degree", "all_gather")])
    def test_parallelism_that_goes_around_the_implementation(self, degree: str, field: str) -> None:
        spread = facts(layer(), {degree: 2})
        assert [name for name in ("ring", "all_gather") if getattr(spread, name)] == [field]
        assert not getattr(facts(layer(skip_sequence_parallel=True), {degree: 2}), field)


class TestCheck:
    """Before a weight is read."""

    def model(self, build: Build, config: Any, blocks: int = 3) -> torch.nn.Module:
        return torch.nn.ModuleList([build(config, f"blocks.{i}.attn") for i in range(blocks)])

    def config(self, **options: Any) -> Any:
        return od_config(build_quant_config({"method": "h3_fp8", "attention": "int8", **options}))

    def test_all_is_well(self, build_layer: Build) -> None:
        for config in (od_config(), self.config(), self.config(attention_skip_layers="0-1")):
            check(config, self.model(build_layer, config))

    def test_a_block_that_is_not_there(self, build_layer: Build) -> None:
        config = self.config(attention_skip_layers="1,3")
        with pytest.raises(H3QuantError, match="names block 3, the nearest of this model is 2: its blocks are 0-2"):
            check(config, self.model(build_layer, config))

    def test_no_block_is_left(self, build_layer: Build) -> None:
        config = self.config(attention_skip_layers="0-2")
        with pytest.raises(H3QuantError, match=r"attention='int8': the selectors skip all of blocks 0-2"):
            check(config, self.model(build_layer, config))

    def test_no_layer_was_reached(self) -> None:
        with pytest.raises(H3QuantError, match="attention='int8' reached no attention layer"):
            check(self.config(), torch.nn.Module())

    def test_a_reason_is_no_error(self, build_layer: Build) -> None:
        config = self.config()
        model = torch.nn.ModuleList([build_layer(config, head_size=32)])
        check(config, model)
        decision = decision_of(model[0])
        assert decision is not None
        assert "head size 32" in decision.reason
