"""Attention over FP8 codes of Q, K and V by FlashAttention-3, with one divisor a document and head.

``out = softmax(q_code . k_code^T * q_divisor * k_divisor * softmax_scale / D) v_code * v_divisor``, without V's mean
(:mod:`.mean`)

The kernel (``fa3-fwd``, sm_90) rounds probabilities times 256 to e4m3 and sums its product with V in the matrix
unit, which keeps about 14 bits of a long sum: with V's mean removed the sum stays small and so does what is lost.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch

from vllm_h3_quant.kernels.attention.codes import TokenCodes
from vllm_h3_quant.kernels.attention.documents import Documents
from vllm_h3_quant.kernels.attention.int8 import running_softmax, score_scale
from vllm_h3_quant.kernels.attention.scaling import Scaling


@cache
def flash_attention_missing() -> str | None:
    """Why FlashAttention-3 cannot be used in this process, or None."""
    return None if find_spec("fa3_fwd_interface") else "needs fa3-fwd: pip install fa3-fwd"


def fp8_attention_reference(
    codes: TokenCodes, scaling: Scaling, documents: Documents, softmax_scale: float
) -> torch.Tensor:
    """fp32 values of the formula above in plain PyTorch, with probabilities rounded as the kernel rounds them."""
    tokens, heads, size = codes.q.shape
    out = torch.zeros(tokens, heads, size, dtype=torch.float32, device=codes.q.device)
    scale = score_scale(softmax_scale, size)
    begin = 0
    for document, length in enumerate(documents.spans[:, 2].tolist()):
        rows = slice(begin, begin + length)
        begin += length
        if not length:
            continue
        factor = (scaling.q_divisor[document].double() * scaling.k_divisor[document].double() * scale)[:, None, None]
        q, k, v = (x[rows].float().double().transpose(0, 1) for x in codes)
        product = running_softmax(q * factor, k, v, codes.v.dtype)
        out[rows] = (product * scaling.v_divisor[document, :, None].double()).transpose(0, 1).float()
    return out


def fp8_attention_flash(
    codes: TokenCodes, scaling: Scaling, documents: Documents, softmax_scale: float
) -> torch.Tensor:
    """bf16 ``(tokens, heads, head_size)`` values of the formula by FlashAttention-3.

    Args:
        codes, scaling, documents: as made for the packed sequence.
        softmax_scale: of the scores.
    """
    from fa3_fwd_interface import flash_attn_varlen_func

    size = codes.q.shape[-1]
    result = flash_attn_varlen_func(
        *codes,
        cu_seqlens_q=documents.cu_seqlens,
        cu_seqlens_k=documents.cu_seqlens,
        max_seqlen_q=documents.longest,
        max_seqlen_k=documents.longest,
        q_descale=scaling.q_divisor,
        k_descale=scaling.k_divisor,
        v_descale=scaling.v_divisor[:, :, 0].contiguous(),
        softmax_scale=softmax_scale / size,
    )
    out: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return out
