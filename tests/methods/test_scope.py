"""Which linears are quantized, checked against the names that the real model uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

from vllm_h3_quant.config.schema import H3QuantOptions, parse
from vllm_h3_quant.methods.base import H3LinearMethod
from vllm_h3_quant.methods.record import decision_of
from vllm_h3_quant.methods.scope import (
    NOT_ASKED,
    ROLES,
    UNKNOWN,
    LinearDecision,
    Storage,
    asked_name,
    decide,
    decide_unasked,
    matches,
    parents,
    role_of,
)

FC1, ADALN, GATE = "blocks.1.mlp.fc1", "blocks.1.adaln_proj.linear", "blocks.1.attn.to_gate_compress"


def options(**keys: object) -> H3QuantOptions:
    return parse("h3_fp8", keys, where="test")


def test_every_linear_of_the_model_has_a_role(load_pipeline: Callable[..., Any]) -> None:
    pipeline = load_pipeline("h3_fp8")
    found = {"transformer": 0, "text_encoder": 0}
    for name, module in pipeline.named_modules():
        if not isinstance(module, LinearBase):
            continue
        role = role_of(module.prefix)
        assert role is not None, f"{name} ({module.prefix}) has no role"
        assert name.startswith(role.component)
        expected = H3LinearMethod if role.quantized else UnquantizedLinearMethod
        assert isinstance(module.quant_method, expected), name
        assert decision_of(module) == decide(options(), module.prefix), name
        found[role.component] += role.quantized
    # 3 blocks of 5, 2 refiner blocks of 4, condition_proj, the final AdaLN; 2 decoder layers of 4.
    assert found == {"transformer": 25, "text_encoder": 8}


def test_every_role_has_a_reason() -> None:
    assert all(role.reason for role in ROLES)


class TestDecide:
    """What becomes of a linear, and why."""

    @pytest.mark.parametrize(
        ("keys", "name", "storage", "reason"),
        [
            ({}, FC1, Storage.CODES, "60% of a block's linear FLOPs"),
            ({}, ADALN, Storage.CODES, "40% of the DiT's bytes"),
            ({"adaln": "keep"}, ADALN, Storage.VALUES, "adaln: keep"),
            ({"adaln": "host"}, ADALN, Storage.HOST, "adaln: host"),
            ({"adaln": "host"}, FC1, Storage.CODES, "60% of a block's linear FLOPs"),
            ({"ignored_layers": ["blocks.1"]}, FC1, Storage.VALUES, "ignored_layers entry 'blocks.1'"),
            ({"ignored_layers": ["blocks.1"]}, "blocks.12.mlp.fc1", Storage.CODES, "60% of a block's linear FLOPs"),
            (
                {"ignored_layers": ["*.linear"], "adaln": "host"},
                ADALN,
                Storage.VALUES,
                "ignored_layers entry '*.linear'",
            ),
            ({"ignored_layers": ["video_patch_proj"]}, "video_patch_proj", Storage.VALUES, "fp32 in and out"),
            ({}, GATE, Storage.VALUES, "the VSA gate is zero"),
        ],
    )
    def test_reasons(self, keys: dict[str, Any], name: str, storage: Storage, reason: str) -> None:
        decision = decide(options(**keys), name)
        assert decision.storage is storage
        assert decision.reason.startswith(reason)
        assert decision.role is role_of(name)

    def test_every_entry_that_matches_is_there(self) -> None:
        """One that is shadowed by another has matched something all the same."""
        entries = ["blocks.2", "blocks.1", "*.fc1"]
        assert decide(options(ignored_layers=entries), FC1).entries == ("blocks.1", "*.fc1")
        assert decide(options(ignored_layers=["*"]), GATE).entries == ("*",)

    def test_a_name_of_another_model(self) -> None:
        assert decide(options(ignored_layers=["*"]), "img_mod.1") == LinearDecision(Storage.VALUES, UNKNOWN)

    def test_a_linear_that_the_engine_asks_no_method_for(self) -> None:
        assert decide_unasked(GATE) == decide(options(), GATE)
        assert (decide_unasked(FC1).storage, decide_unasked(FC1).reason) == (Storage.VALUES, NOT_ASKED)
        assert decide_unasked("img_mod.1") == LinearDecision(Storage.VALUES, UNKNOWN)

    def test_names_inside_a_component(self) -> None:
        inside = "text_model.layers.0.mlp.down_proj"
        assert decide(options(), asked_name("text_encoder", inside)).storage is Storage.CODES
        assert decide(options(), asked_name("transformer", FC1)).storage is Storage.CODES


@pytest.mark.parametrize(
    "name",
    ["blocks.0.attn.q_proj", "blocks.0.attn.qkv_proj.weight", "transformer.blocks.0.attn.qkv_proj", "img_mod.1", ""],
)
def test_names_of_no_role(name: str) -> None:
    assert role_of(name) is None


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("blocks.1.attn.qkv_proj", True),
        ("blocks.1.attn", True),
        ("blocks.1", True),
        ("blocks", True),
        ("blocks.*.attn", True),
        ("*.qkv_proj", True),
        ("blocks.[0-3]", True),
        ("blocks.1*", True),
        ("blocks.11", False),
        ("locks.1", False),
        ("qkv_proj", False),
        ("blocks.1.attn.qkv", False),
        ("attn", False),
    ],
)
def test_entries_match_whole_names_and_parents(entry: str, expected: bool) -> None:
    assert matches("blocks.1.attn.qkv_proj", entry) is expected


def test_a_block_is_not_the_prefix_of_another() -> None:
    assert not matches("blocks.12.mlp.fc1", "blocks.1")
    assert not matches("token_refiner.blocks.1.mlp.fc1", "blocks.1")


def test_parents_are_dotted() -> None:
    assert parents("a.b.c") == ["a.b.c", "a.b", "a"]
