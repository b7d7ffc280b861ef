"""The implementation: documents, skip selectors, what goes to the engine's and what is counted."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from vllm_omni.diffusion.attention.backends.abstract import AttentionMetadata
from vllm_omni.diffusion.forward_context import ForwardContext, override_forward_context

from vllm_h3_quant.attention import implementation as module
from vllm_h3_quant.attention.implementation import QuantizedAttention
from vllm_h3_quant.kernels.attention import KINDS

SCALE = 64**-0.5


class Stock:
    """Returns the query, so that a call that comes here is seen."""

    causal = False

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: Any = None) -> Any:
        return query

    def forward_paged(self, context: Any) -> Any:
        return context


def implementation(kind: str = "int8", **more: Any) -> QuantizedAttention:
    return QuantizedAttention(Stock(), kind=kind, softmax_scale=SCALE, **more)


def metadata(*boundaries: int, **extra: Any) -> AttentionMetadata:
    ends = torch.tensor(boundaries, dtype=torch.int32)
    longest = int(ends.diff().max())
    lengths = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": longest, "max_seqlen_k": longest}
    return AttentionMetadata(extra={**lengths, **extra})


def qkv(tokens: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(1, tokens, 3, 2, 64, generator=generator).bfloat16().unbind(2)


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (t.float().transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, scale=SCALE).transpose(1, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_document_attends_to_itself_only(kind: str) -> None:
    q, k, v = qkv(40)
    out = implementation(kind).forward(q, k, v, metadata(0, 25, 40))
    assert out.shape == q.shape
    for start, end in ((0, 25), (25, 40)):
        want = exact(q[:, start:end], k[:, start:end], v[:, start:end])
        error = (out[:, start:end].float() - want).norm() / want.norm()
        # Codes of 8 bits in Q, K, P and V; over the boundary it would be of order one.
        assert 0 < error < 0.08


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is logged once, by the engine's rule: the same text and values are one message."""
    lines: list[str] = []

    def info_once(text: str, *values: object) -> None:
        if text % values not in lines:
            lines.append(text % values)

    monkeypatch.setattr(module.logger, "info_once", info_once)
    return lines


def test_a_call_that_is_not_served_goes_to_the_engines(said: list[str]) -> None:
    q, k, v = qkv(8)
    for _ in range(2):
        assert implementation().forward(q, k, v, None) is q
    assert said == ["8-bit attention leaves calls to the engine's attention: the call has no packed sequence lengths"]


def test_pages_go_to_the_engines() -> None:
    context = object()
    assert implementation().forward_paged(context) is context


@pytest.mark.parametrize(("step", "stock"), [(0, True), (1, False), (2, True), (None, True)])
def test_skipped_steps(step: int | None, stock: bool) -> None:
    q, k, v = qkv(8)
    ours = implementation(skipped_steps=frozenset({0, 2}))
    with override_forward_context(ForwardContext(denoise_step_idx=step)):
        assert (ours.forward(q, k, v, metadata(0, 8)) is q) == stock


def test_a_call_outside_a_step_is_skipped_with_a_selector_only() -> None:
    q, k, v = qkv(8)
    assert implementation(skipped_steps=frozenset({0})).forward(q, k, v, metadata(0, 8)) is q
    assert implementation().forward(q, k, v, metadata(0, 8)) is not q


def test_the_engines_own_selectors_skip_too(said: list[str]) -> None:
    q, k, v = qkv(8)
    assert implementation().forward(q, k, v, metadata(0, 8, kv_cache_dtype="float")) is q
    assert implementation().forward(q, k, v, metadata(0, 8, kv_cache_dtype="int8")) is not q
    assert not said, "what was asked for needs no reason"


def test_the_engines_attributes_are_there() -> None:
    ours = implementation("fp8")
    assert ours.causal is False
    assert copy.copy(ours).stock is ours.stock
    with pytest.raises(AttributeError):
        _ = ours.nothing
    assert ours.supports_kv_cache_dtype("fp8", "cuda")
    assert ours.supports_kv_cache_dtype(None, "cuda")
    assert not ours.supports_kv_cache_dtype("int8", "cuda")


def test_nothing_is_read_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """With tensors that have no values at all a call still reaches the kernel."""
    got: dict[str, Any] = {}

    def attend(query: torch.Tensor, *args: Any, **more: Any) -> torch.Tensor:
        got.update(more, strides=query.stride())
        return query

    monkeypatch.setattr(module.kernels, "attend", attend)
    q, k, v = torch.empty(1, 12, 3, 2, 64, dtype=torch.bfloat16, device="meta").unbind(2)
    lengths = metadata(0, 9, 12, valid_kv_length=9)
    ends = lengths.extra["cu_seqlens_q"].to("meta")
    lengths.extra.update(cu_seqlens_q=ends, cu_seqlens_k=ends)
    lengths.attn_mask = torch.empty(1, 12, dtype=torch.bool, device="meta")
    assert implementation().forward(q, k, v, lengths).shape == q.shape
    assert got == {"max_seqlen": 9, "softmax_scale": SCALE, "kind": "int8", "strides": (384, 64, 1)}
