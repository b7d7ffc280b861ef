"""Attention on the CPU: PyTorch's scaled_dot_product_attention."""

from __future__ import annotations

from typing import Any

import torch
from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl

from vllm_h3_quant.upstream.sdpa import check_sdpa, run_sdpa


class CpuSDPAImpl(SDPAImpl):
    """SDPA without the engine's dispatch by accelerator, which has no entry for a CPU.

    Documents of a packed sequence are attended one by one, so that several requests may share a forward.
    """

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_metadata: Any = None
    ) -> torch.Tensor:
        ends = _document_ends(attn_metadata)
        if len(ends) < 2:
            return run_sdpa(self, query, key, value, attn_metadata)
        out = torch.empty_like(query)
        start = 0
        for end in ends:
            if end > start:
                part = slice(start, end)
                out[:, part] = run_sdpa(self, query[:, part], key[:, part], value[:, part], None)
            start = end
        return out


def _document_ends(attn_metadata: Any) -> list[int]:
    """Where the documents end; nothing where a mask describes the sequence instead."""
    if attn_metadata is None or attn_metadata.attn_mask is not None:
        return []
    boundaries = attn_metadata.extra.get("cu_seqlens_q")
    return [] if boundaries is None else boundaries[1:].tolist()


class CpuSDPABackend(SDPABackend):
    """The engine's SDPA backend with the implementation above."""

    @classmethod
    def supports_multi_doc_packed_varlen(cls) -> bool:
        return True

    @staticmethod
    def get_impl_cls() -> type[CpuSDPAImpl]:
        check_sdpa()
        return CpuSDPAImpl
