"""The ``AttentionImpl`` that calls the 8-bit kernels, around the engine's own."""

from __future__ import annotations

from typing import Any

import torch
from vllm_omni.diffusion.attention.backends.abstract import AttentionImpl

from vllm_h3_quant.attention.packed import refusal
from vllm_h3_quant.kernels import attention as kernels
from vllm_h3_quant.log import get_logger
from vllm_h3_quant.upstream.attention import denoise_step, says_float

logger = get_logger(__name__)

LEFT = "8-bit attention leaves calls to the engine's attention: %s"


class QuantizedAttention(AttentionImpl):
    """8-bit attention for packed documents; what it does not serve goes to the engine's implementation.

    It runs behind sequence parallelism's all-to-all: all tokens, and this rank's heads.

    Args:
        stock: the implementation that the engine chose. Its attributes are this object's too.
        kind: one of ``kernels.attention.KINDS``.
        softmax_scale: factor of the scores before the softmax.
        skipped_steps: denoising steps that keep ``stock``. With any, so does a call outside a step.
    """

    def __init__(
        self,
        stock: Any,
        *,
        kind: str,
        softmax_scale: float,
        skipped_steps: frozenset[int] = frozenset(),
    ) -> None:
        self.stock = stock
        self.kind = kind
        self.softmax_scale = softmax_scale
        self.skipped_steps = skipped_steps

    def __getattr__(self, name: str) -> Any:
        if name == "stock":  # not set yet, as while this object is copied
            raise AttributeError(name)
        return getattr(self.stock, name)

    def supports_kv_cache_dtype(self, kv_cache_dtype: str | None, platform_key: str) -> bool:
        return kv_cache_dtype in (None, self.kind)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_metadata: Any = None
    ) -> torch.Tensor:
        """``(1, tokens, heads, head_size)`` in and out; a document attends to itself only."""
        if self._skips(attn_metadata):
            return self.stock.forward(query, key, value, attn_metadata)
        reason = refusal(query, key, value, attn_metadata)
        if reason is not None:
            logger.info_once(LEFT, reason)
            return self.stock.forward(query, key, value, attn_metadata)
        out = kernels.attend(
            query[0],
            key[0],
            value[0],
            attn_metadata.extra["cu_seqlens_q"],
            max_seqlen=attn_metadata.extra["max_seqlen_q"],
            softmax_scale=self.softmax_scale,
            kind=self.kind,
        )
        return out[None]

    def forward_paged(self, paged_kv_context: Any) -> torch.Tensor:
        logger.info_once(LEFT, "keys and values are in pages")
        return self.stock.forward_paged(paged_kv_context)

    def skips_step(self) -> bool:
        """Whether this package's selector leaves the running step to the engine's implementation."""
        if not self.skipped_steps:
            return False
        step = denoise_step()
        return step is None or step in self.skipped_steps

    def _skips(self, metadata: Any) -> bool:
        """Whether this package's or the engine's selectors leave the running call out."""
        return self.skips_step() or says_float(metadata)
