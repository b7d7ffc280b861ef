"""Attention of a block straight from its qkv projection."""

from __future__ import annotations

from typing import Any

import torch
from vllm_omni.diffusion.layers.fused_qk_norm_rope import fused_qk_norm_rope

from vllm_h3_quant.blocks.producers import has_kernel
from vllm_h3_quant.kernels import attention as kernels
from vllm_h3_quant.kernels.rows import QuantizedRows, RowFormat
from vllm_h3_quant.upstream.attention import left_out_by_engine
from vllm_h3_quant.upstream.dit_block import packed_attention


# An island like the engine's own: the step is read on the host, and kernels take lengths as Python integers.
@torch.compiler.disable
def attend(
    attn: Any, qkv: torch.Tensor, rope_table: torch.Tensor, row_format: RowFormat | None, **packing: Any
) -> torch.Tensor | QuantizedRows:
    """q/k RMSNorm, RoPE and 8-bit attention within each document.

    A step that the selectors leave out runs the engine's attention.

    Args:
        attn: a ``MiniMaxH3Attention`` without an obstacle (:func:`~.edges.attention_obstacle`).
        qkv: ``(tokens, 3 * heads * head_size)`` output of its projection.
        rope_table: ``(tokens, rotated channels)`` cosines and sines.
        row_format: of the codes for ``out_proj``; None for values.
        packing: ``cu_seqlens``, ``max_seqlen`` and the rest of the engine's packing.

    Returns:
        ``(tokens, heads * head_size)`` values or codes.
    """
    q, k, v = (part.unflatten(-1, (attn.num_heads, attn.head_dim)) for part in qkv.chunk(3, dim=-1))
    implementation = attn.attention.attention
    weights = (attn.q_norm.weight, attn.k_norm.weight)
    eps = attn.q_norm.variance_epsilon
    if left_out_by_engine(attn.attention) or implementation.skips_step():
        q, k = fused_qk_norm_rope(q, k, *weights, rope_table, eps)
        return packed_attention(attn, q, k, v, **packing).flatten(1)
    rotary = None
    if has_kernel(qkv):
        rotary = kernels.rotary_of(*weights, rope_table, eps, heads=attn.num_heads)
    else:
        q, k = fused_qk_norm_rope(q, k, *weights, rope_table, eps)
    out = kernels.attend_fused(
        q,
        k,
        v,
        packing["cu_seqlens"],
        max_seqlen=packing["max_seqlen"],
        softmax_scale=implementation.softmax_scale,
        kind=implementation.kind,
        rotary=rotary,
        row_format=row_format,
    )
    return out.flatten(1) if isinstance(out, torch.Tensor) else out
