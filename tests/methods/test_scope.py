"""Which linears are quantized, checked against the names that the real model uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

from vllm_h3_quant.methods.base import H3LinearMethod
from vllm_h3_quant.methods.scope import ROLES, matches, parents, role_of


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
        found[role.component] += role.quantized
    # 3 blocks of 5, 2 refiner blocks of 4, condition_proj, the final AdaLN; 2 decoder layers of 4.
    assert found == {"transformer": 25, "text_encoder": 8}


def test_every_role_has_a_reason() -> None:
    assert all(role.reason for role in ROLES)


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
