"""Attention over FP8 codes of Q, K and V by FlashAttention-3, with one divisor a document and head.

``out = softmax(q_code . k_code^T * q_divisor * k_divisor * softmax_scale / D) v_code * v_divisor + v_mean``

The kernel (``fa3-fwd``, sm_90) rounds probabilities times 256 to e4m3 and sums its product with V in the matrix
unit, which keeps about 14 bits of a long sum: with V's mean removed the sum stays small and so does what is lost.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
import triton
import triton.language as tl

from vllm_h3_quant.kernels.attention.codes import TokenCodes
from vllm_h3_quant.kernels.attention.documents import TILE, Documents
from vllm_h3_quant.kernels.attention.int8 import running_softmax, score_scale
from vllm_h3_quant.kernels.attention.scaling import Scaling


@cache
def flash_attention_missing() -> str | None:
    """Why FlashAttention-3 cannot be used in this process, or None."""
    return None if find_spec("fa3_fwd_interface") else "needs fa3-fwd: pip install fa3-fwd"


def fp8_attention_reference(
    codes: TokenCodes, scaling: Scaling, documents: Documents, softmax_scale: float, out_dtype: torch.dtype
) -> torch.Tensor:
    """The formula above in plain PyTorch, with probabilities rounded as the kernel rounds them."""
    tokens, heads, size = codes.q.shape
    out = torch.zeros(tokens, heads, size, dtype=out_dtype, device=codes.q.device)
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
        values = product * scaling.v_divisor[document, :, None].double() + scaling.v_mean[document, :, None].double()
        out[rows] = values.transpose(0, 1).to(out_dtype)
    return out


def fp8_attention_flash(
    codes: TokenCodes, scaling: Scaling, documents: Documents, softmax_scale: float, out_dtype: torch.dtype
) -> torch.Tensor:
    """``(tokens, heads, head_size)`` attention by FlashAttention-3, then V's mean added in place.

    Args:
        codes, scaling, documents: as made for the packed sequence.
        softmax_scale: of the scores.
        out_dtype: dtype of the result; the kernel itself writes bf16.
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
    return add_mean(out, scaling.v_mean, documents).to(out_dtype)


def add_mean(out: torch.Tensor, mean: torch.Tensor, documents: Documents) -> torch.Tensor:
    """``out[t, h] += mean[document of t, h]`` in place, for a contiguous ``(tokens, heads, head_size)`` tensor."""
    _, heads, size = out.shape
    _add_mean_kernel[(documents.tiles.shape[0], heads)](
        out, mean, documents.tiles, heads, TILE=TILE, SIZE=size, num_warps=4
    )
    return out


@triton.jit
def _add_mean_kernel(out_ptr, mean_ptr, tiles_ptr, heads, TILE: tl.constexpr, SIZE: tl.constexpr):
    tile = tl.program_id(0)
    head = tl.program_id(1)
    document = tl.load(tiles_ptr + tile * 4)
    token = tl.load(tiles_ptr + tile * 4 + 1).to(tl.int64) + tl.arange(0, TILE)
    kept = (tl.arange(0, TILE) < tl.load(tiles_ptr + tile * 4 + 2))[:, None]
    channel = tl.arange(0, SIZE)
    out = out_ptr + (token[:, None] * heads + head) * SIZE + channel
    mean = tl.load(mean_ptr + (document * heads + head) * SIZE + channel)
    value = tl.load(out, mask=kept, other=0.0).to(tl.float32) + mean[None, :]
    tl.store(out, value.to(out_ptr.dtype.element_ty), mask=kept)
