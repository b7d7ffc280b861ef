"""Attention on the CPU: PyTorch's scaled_dot_product_attention."""

from __future__ import annotations

import torch
from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl

from vllm_h3_quant.upstream.sdpa import check_sdpa, run_sdpa


class CpuSDPAImpl(SDPAImpl):
    """SDPA without the engine's dispatch by accelerator, which has no entry for a CPU."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_metadata: object = None
    ) -> torch.Tensor:
        return run_sdpa(self, query, key, value, attn_metadata)


class CpuSDPABackend(SDPABackend):
    """The engine's SDPA backend with the implementation above."""

    @staticmethod
    def get_impl_cls() -> type[CpuSDPAImpl]:
        check_sdpa()
        return CpuSDPAImpl
