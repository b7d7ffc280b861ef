"""Lets this package run MiniMax-H3's DiT blocks, with the block's own signature, hooks and weights around it.

Why: what lies between a block's linears is written out in the block's ``forward``, so that a producer of codes has no
other place to stand. Everything that wraps a block (offload, sequence parallelism, step caches, FSDP, compilation)
wraps its ``forward`` or its call, and finds the same method with the same parameters.
Symbols, vLLM-Omni 0.30.0, in ``vllm_omni.diffusion.models.minimax_h3.minimax_h3_transformer``:
``MiniMaxH3DiTBlock.forward`` is replaced; of the block ``norm1``, ``attn``, ``norm2``, ``mlp`` and ``adaln_proj`` are
read, of ``MiniMaxH3Attention`` the projections, norms, sizes, ``rot_dim``, ``to_gate_compress`` and ``attention``, and
``_run_packed_attention`` is called; of ``MiniMaxH3MLP`` ``fc1``, ``act_fn`` and ``fc2``. The elementwise functions are
those of ``vllm_omni.diffusion.layers``.
When they move: compare ``MiniMaxH3DiTBlock.forward``, ``MiniMaxH3Attention.forward`` and ``MiniMaxH3MLP.forward``
with ``blocks/forward.py``, and the kernels with ``kernels/producers``; ``tests/blocks`` on a GPU holds them
together byte by byte.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import Module

from vllm_h3_quant.upstream.preflight import Symbol

_TRANSFORMER = "vllm_omni.diffusion.models.minimax_h3.minimax_h3_transformer"
_MODULATION = "vllm_omni.diffusion.layers.indexed_modulation"
_GIVEN = ("t_emb", "combined_indices", "rope_table", "cu_seqlens", "max_seqlen", "packed_total", "num_requests")
SYMBOLS = (
    Symbol("vllm-omni", _TRANSFORMER, "MiniMaxH3DiTBlock.forward", ("self", "x", *_GIVEN)),
    Symbol("vllm-omni", _TRANSFORMER, "MiniMaxH3Attention.forward", ("x", "rope_table", "packed_total")),
    Symbol(
        "vllm-omni",
        _TRANSFORMER,
        "MiniMaxH3Attention._run_packed_attention",
        ("q", "k", "v", "cu_seqlens", "max_seqlen", "packed_total", "num_requests", "video_layout"),
    ),
    Symbol("vllm-omni", _TRANSFORMER, "MiniMaxH3MLP.forward", ("x",)),
    Symbol("vllm-omni", _MODULATION, "rms_norm_indexed_scale_shift", ("x", "weight", "shift", "scale", "indices")),
    Symbol("vllm-omni", _MODULATION, "indexed_gate_rms_norm_scale_shift", ("residual", "gate", "branch", "weight")),
    Symbol("vllm-omni", _MODULATION, "indexed_gate", ("x", "gate", "other", "indices")),
    Symbol("vllm-omni", "vllm_omni.diffusion.layers.fused_qk_norm_rope", "fused_qk_norm_rope", ("rope_table",)),
)

_ORIGINAL = "_h3_quant_original"

Wanted = Callable[[Any], bool]
Run = Callable[..., torch.Tensor]


def install(wanted: Wanted, run: Run) -> None:
    """Run each block that ``wanted`` accepts by ``run(block, x, **arguments)``, others as they are.

    A second call replaces the first.
    """
    from vllm_omni.diffusion.models.minimax_h3.minimax_h3_transformer import MiniMaxH3DiTBlock

    wrapped = MiniMaxH3DiTBlock.forward
    original = getattr(wrapped, _ORIGINAL, wrapped)

    @functools.wraps(original)
    def forward(self: Any, x: torch.Tensor, **arguments: Any) -> torch.Tensor:
        out: torch.Tensor = (run if wanted(self) else original)(self, x, **arguments)
        return out

    setattr(forward, _ORIGINAL, original)
    MiniMaxH3DiTBlock.forward = forward


def blocks(model: Module) -> Iterator[tuple[str, Any]]:
    """Names and DiT blocks of a model; the token refiner's are of another kind."""
    from vllm_omni.diffusion.models.minimax_h3.minimax_h3_transformer import MiniMaxH3DiTBlock

    return ((name, module) for name, module in model.named_modules() if isinstance(module, MiniMaxH3DiTBlock))


def packed_attention(attn: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **packing: Any) -> torch.Tensor:
    """The engine's attention of one block over ``(tokens, heads, head_size)`` operands that are normed and rotated."""
    out: torch.Tensor = attn._run_packed_attention(q, k, v, **packing)
    return out
