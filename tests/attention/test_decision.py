"""Which attention a layer gets, from data alone: any GPU, any layer, on any machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from vllm_h3_quant.attention.decision import (
    KEPT_BY_AUTO,
    NOT_ASKED,
    SKIPPED,
    AttentionDecision,
    Choice,
    DeviceFacts,
    LayerFacts,
    decide,
    obstacle,
    on_device,
)
from vllm_h3_quant.attention.request import AttentionRequest
from vllm_h3_quant.config.schema import Method
from vllm_h3_quant.engine import quant_config
from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.kernels.attention import backends, select

CPU = DeviceFacts(None, "some CPU")
LAYER = LayerFacts(block=1, heads=4, kv_heads=4, head_size=128, causal=False, backend="FLASH_ATTN")
INT8 = AttentionRequest("attention='int8'", "int8", Method.FP8)

TURING, AMPERE, ADA, HOPPER, BLACKWELL, CONSUMER = (7, 0), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)
SERVED: dict[str, set[Any]] = {
    "int8": {AMPERE, ADA, HOPPER, BLACKWELL, CONSUMER, None},
    "fp8": {HOPPER, None},
}
AUTO: dict[Method, dict[Any, str | None]] = {
    Method.FP8: {TURING: None, AMPERE: "int8", ADA: "int8", HOPPER: "fp8", BLACKWELL: None, CONSUMER: "int8"},
    Method.INT8: {TURING: None, AMPERE: "int8", ADA: "int8", HOPPER: "int8", BLACKWELL: None, CONSUMER: "int8"},
}


@pytest.fixture(autouse=True)
def with_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention-3 as installed, wherever this runs."""
    table = [replace(backend, missing=lambda: None) for backend in backends.BACKENDS]
    monkeypatch.setattr(backends, "BACKENDS", tuple(table))


def gpu(capability: tuple[int, int] | None) -> DeviceFacts:
    return CPU if capability is None else DeviceFacts(capability, "some GPU")


class TestDevice:
    @pytest.mark.parametrize("capability", [TURING, (7, 5), AMPERE, (8, 6), ADA, HOPPER, (10, 3), (12, 0), None])
    @pytest.mark.parametrize("kind", ["int8", "fp8"])
    def test_a_kind_asked_for_by_name(self, kind: str, capability: tuple[int, int] | None) -> None:
        served = {(8, 6): AMPERE, (10, 3): BLACKWELL}.get(capability, capability) if capability else None
        if served in SERVED[kind]:
            assert on_device(kind, Method.FP8, gpu(capability)) == Choice(kind, select(kind, capability).name)
        else:
            instead = next((other for other in SERVED if other != kind and served in SERVED[other]), "none")
            with pytest.raises(H3QuantError, match=rf"some GPU \(sm_\d+\): .*; use attention='{instead}' instead$"):
                on_device(kind, Method.FP8, gpu(capability))

    @pytest.mark.parametrize(("method", "capability"), [(method, key) for method, row in AUTO.items() for key in row])
    def test_auto_says_why(self, method: Method, capability: tuple[int, int]) -> None:
        """FP8 linears take what e4m3 costs attention; INT8 ones do not."""
        chosen = on_device("auto", method, gpu(capability))
        assert chosen.kind == AUTO[method][capability]
        assert chosen.why
        assert chosen.kernel == (select(chosen.kind, capability).name if chosen.kind else "")

    @pytest.mark.parametrize(
        ("capability", "reason"), [(AMPERE, "needs sm_90"), (ADA, "needs sm_90"), (CONSUMER, "not built for sm_100")]
    )
    def test_a_configuration_is_refused_with_what_runs(
        self, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], reason: str
    ) -> None:
        monkeypatch.setattr(quant_config, "this_device", lambda: gpu(capability))
        with pytest.raises(H3QuantError) as caught:
            quant_config.build("h3_int8", {"attention": "fp8"}, where="component 'transformer'")
        message = str(caught.value)
        assert message.startswith("component 'transformer': attention='fp8' cannot run on some GPU (sm_")
        assert message.endswith("use attention='int8' instead")
        assert reason in message
        assert "\n" not in message


class TestDecide:
    def test_a_served_layer_has_all_that_carrying_it_out_needs(self) -> None:
        asked = replace(INT8, skipped_steps=frozenset({0, 3}))
        assert decide(asked, LAYER, gpu(HOPPER)) == AttentionDecision(
            "int8", "attention='int8'", select("int8", HOPPER).name, skipped_steps=frozenset({0, 3})
        )

    @pytest.mark.parametrize(("block", "reason"), [(0, None), (2, SKIPPED), (None, NOT_ASKED)])
    def test_what_the_request_leaves_out(self, block: int | None, reason: str | None) -> None:
        decision = decide(replace(INT8, skipped_blocks=frozenset({2})), replace(LAYER, block=block), CPU)
        assert (decision.kind, decision.reason) == (("int8", INT8.source) if reason is None else (None, reason))

    def test_the_token_refiner_has_no_block_that_a_selector_names(self) -> None:
        asked = replace(INT8, token_refiner=True, skipped_blocks=frozenset(range(50)))
        assert decide(asked, replace(LAYER, block=None), CPU).kind == "int8"

    def test_auto_may_keep_the_engines(self) -> None:
        decision = decide(AttentionRequest("attention='auto'", "auto", Method.INT8), LAYER, gpu(BLACKWELL))
        assert (decision.kind, decision.reason, decision.kernel) == (None, KEPT_BY_AUTO, "")
        assert decision.why

    def test_a_device_that_cannot_is_told_before_a_layer_that_is_left_out(self) -> None:
        with pytest.raises(H3QuantError, match="use attention='none' instead"):
            decide(replace(INT8, skipped_blocks=frozenset({1})), LAYER, gpu((7, 5)))

    def test_an_obstacle_is_a_reason_and_an_error_where_the_engines_option_asked(self) -> None:
        causal = replace(LAYER, causal=True)
        assert decide(INT8, causal, CPU) == AttentionDecision(None, "causal attention")
        with pytest.raises(H3QuantError, match=r"^attention='int8' cannot be served: causal attention; leave it out$"):
            decide(replace(INT8, by_engine_option=True), causal, CPU)

    def test_the_engines_option_may_leave_out_a_layer_with_an_obstacle(self) -> None:
        asked = replace(INT8, by_engine_option=True, skipped_blocks=frozenset({1}))
        assert decide(asked, replace(LAYER, causal=True), CPU).reason == SKIPPED


class TestObstacle:
    @pytest.mark.parametrize(
        "fine", [{}, {"backend": "SDPA"}, {"backend": "TRTLLM_ATTN"}, {"backend": "CUDNN_ATTN"}, {"head_size": 64}]
    )
    def test_none(self, fine: dict[str, Any]) -> None:
        assert obstacle(replace(LAYER, **fine)) is None

    @pytest.mark.parametrize(
        ("changes", "says"),
        [
            ({"ring": True}, "ring parallelism"),
            ({"all_gather": True}, "all-gather parallelism"),
            ({"causal": True}, "causal"),
            ({"kv_heads": 2}, "4 query heads share 2"),
            ({"head_size": 96}, "head size 96, the kernels take 64 and 128"),
            ({"backend": "FASTVIDEO_VSA"}, "FASTVIDEO_VSA"),
            ({"backend": "RAINFUSION_ATTN"}, "RAINFUSION_ATTN"),
            ({"backend": "SAGE_ATTN"}, "SAGE_ATTN"),
            ({"backend": "SAGE_ATTN_3"}, "SAGE_ATTN_3"),
            ({"backend": "TRTLLM_ATTN", "backend_options": True}, "TRTLLM_ATTN with options"),
        ],
    )
    def test_is_told(self, changes: dict[str, Any], says: str) -> None:
        assert says in str(obstacle(replace(LAYER, **changes)))
