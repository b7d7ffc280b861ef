"""The forward of a DiT block whose edges are fused one by one.

What it computes is ``MiniMaxH3DiTBlock.forward`` of the engine: the same steps in the same order, each linear called
as the module that it is. Where an edge is not fused, the step and the module before it are the engine's.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm_omni.diffusion.layers.indexed_modulation import indexed_gate

from vllm_h3_quant.blocks.attention import attend
from vllm_h3_quant.blocks.edges import Edge, obstacles
from vllm_h3_quant.blocks.producers import gate_norm_modulate, norm_modulate
from vllm_h3_quant.kernels.producers import swiglu
from vllm_h3_quant.kernels.rows import RowFormat


def forward(
    block: Any,
    x: torch.Tensor,
    *,
    t_emb: torch.Tensor,
    combined_indices: torch.Tensor,
    rope_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    packed_total: int,
    sp_seq_lens: list[int] | None = None,
    **packing: Any,
) -> torch.Tensor:
    """``(tokens, hidden)`` after one block; arguments as of ``MiniMaxH3DiTBlock.forward``."""
    attn, mlp = block.attn, block.mlp
    found = obstacles(block)
    packing = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen, "packed_total": packed_total, **packing}
    shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = block.adaln_proj(t_emb)

    h = norm_modulate(x, block.norm1, shift_msa, scale_msa, combined_indices, _taken_by(attn.qkv_proj, found[Edge.QKV]))
    if found[Edge.ATTENTION] is None:
        qkv, _ = attn.qkv_proj(h)
        out = attend(attn, qkv, rope_table, _taken_by(attn.out_proj, found[Edge.OUT]), **packing)
        h, _ = attn.out_proj(out)
    else:
        h = attn(h, rope_table=rope_table, sp_seq_lens=sp_seq_lens, **packing)

    fc1_takes = _taken_by(mlp.fc1, found[Edge.FC1])
    x, h = gate_norm_modulate(x, gate_msa, h, block.norm2, shift_mlp, scale_mlp, combined_indices, fc1_takes)
    if found[Edge.FC2] is None:
        hidden, _ = mlp.fc1(h)
        h, _ = mlp.fc2(swiglu(hidden, mlp.fc2.quant_method.row_format))
    else:
        h = mlp(h)
    result: torch.Tensor = indexed_gate(x, gate_mlp, h, combined_indices)
    return result


def _taken_by(linear: Any, obstacle: str | None) -> RowFormat | None:
    """The codes that a linear takes, or None where its edge is not fused."""
    return None if obstacle else linear.quant_method.row_format
