"""Which calls the kernels serve. Each refusal differs from a served call in one thing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm_omni.diffusion.attention.backends.abstract import AttentionMetadata, QueryRange

from vllm_h3_quant.attention.packed import refusal

TOKENS, USED = 12, 9


def metadata(**changes: Any) -> AttentionMetadata:
    """What ``_run_packed_attention`` builds on a backend without mask."""
    boundaries = torch.tensor([0, USED, TOKENS], dtype=torch.int32)
    extra = {
        "cu_seqlens_q": boundaries,
        "cu_seqlens_k": boundaries,
        "max_seqlen_q": USED,
        "max_seqlen_k": USED,
        "valid_kv_length": USED,
        **changes.pop("extra", {}),
    }
    return AttentionMetadata(extra=extra, **changes)


def qkv(**changes: Any) -> tuple[torch.Tensor, ...]:
    tensor = torch.zeros(**{"size": (1, TOKENS, 2, 64), "dtype": torch.bfloat16, **changes})
    return tensor, tensor, tensor


PADDING = torch.arange(TOKENS)[None] < USED


def test_served() -> None:
    assert refusal(*qkv(), metadata()) is None
    assert refusal(*qkv(dtype=torch.float16), metadata()) is None


def test_views_of_one_tensor_are_served() -> None:
    q, k, v = torch.zeros(1, TOKENS, 3, 2, 64, dtype=torch.bfloat16).unbind(2)
    assert refusal(q, k, v, metadata()) is None


def test_the_mask_of_the_padding_says_nothing_new() -> None:
    assert refusal(*qkv(), metadata(attn_mask=PADDING)) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"attn_mask": PADDING.float()},
        {"attn_mask": PADDING[:, :-1]},
        {"attn_mask": PADDING.expand(2, TOKENS)},
        {"attn_mask": PADDING[:, None, None]},
        {"attn_mask": PADDING, "extra": {"valid_kv_length": None}},
        {"attn_mask": PADDING, "extra": {"valid_kv_length": TOKENS, "max_seqlen_q": TOKENS, "max_seqlen_k": TOKENS}},
        {"attn_mask": PADDING, "extra": dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), torch.zeros(4).int())},
    ],
)
def test_any_other_mask(changes: dict[str, Any]) -> None:
    assert refusal(*qkv(), metadata(**changes)) == "an attention mask"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"full_attn_spans": [[(0, 3)]]}, "causal"),
        ({"query_ranges": (QueryRange(0, 3, 0),)}, "part of the sequence"),
        ({"joint_query": torch.zeros(1)}, "joint"),
        ({"joint_attn_mask": torch.zeros(1)}, "joint"),
        ({"extra": {"cu_seqlens_k": torch.tensor([0, 4, TOKENS])}}, "lengths of their own"),
        ({"extra": {"max_seqlen_k": 3}}, "lengths of their own"),
        ({"extra": dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), torch.zeros(3))}, "int32"),
        ({"extra": dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), None)}, "int32"),
    ],
)
def test_metadata_of_other_attention(changes: dict[str, Any], says: str) -> None:
    reason = refusal(*qkv(), metadata(**changes))
    assert reason is not None
    assert says in reason


def test_without_lengths() -> None:
    assert refusal(*qkv(), None) == "the call has no packed sequence lengths"
    assert "cu_seqlens_q" in str(refusal(*qkv(), AttentionMetadata()))


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(2, 3).contiguous().transpose(2, 3)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.expand(2, *t.shape[1:]), "the batch holds 2"),
        (lambda t: t.float(), "float32 is neither"),
        (transposed, "next to each other"),
    ],
)
def test_operands(change: Callable[[torch.Tensor], torch.Tensor], says: str) -> None:
    assert says in str(refusal(*map(change, qkv()), metadata()))


def test_heads_that_are_shared() -> None:
    q, k, v = qkv()
    assert "shape" in str(refusal(q, k[:, :, :1], v[:, :, :1], metadata()))
