"""Names and row orders of published checkpoints, from the native ones.

A native file keeps the rows of ``qkv_proj`` by head, q, k and v of one head before the next. ComfyUI keeps q of all
heads, then k, then v; so does the model. Diffusers keeps the three apart, and ``[up; gate]`` where ``fc1`` is
``[gate; up]``. Names as in vLLM-Omni 0.30, ``diffusion/models/minimax_h3/fasth3.py``.
"""

from __future__ import annotations

from enum import Enum

import torch


class Order(Enum):
    """Which rows a file keeps together."""

    NATIVE = "native"
    COMFY = "comfy"
    DIFFUSERS = "diffusers"


_TOP = {
    "video_patch_proj": "proj_in",
    "audio_patch_proj": "audio_proj_in",
    "condition_proj": "context_embedder",
    "time_embedder.proj_in": "time_embedder.linear_1",
    "time_embedder.proj_out": "time_embedder.linear_2",
    "token_refiner.final_norm": "token_refiner.final_norm",
    "final_layer.norm": "norm_out.norm",
    "final_layer.adaln_proj.linear": "norm_out.linear",
    "final_layer.video_out": "proj_out",
    "final_layer.audio_out": "audio_proj_out",
}
_IN_BLOCK = {
    "attn.out_proj": "attn.to_out.0",
    "attn.q_norm": "attn.norm_q",
    "attn.k_norm": "attn.norm_k",
    "mlp.fc1": "ff.net.0.proj",
    "mlp.fc2": "ff.net.2",
    "adaln_proj.linear": "adaln_proj.linear",
    "norm1": "norm1",
    "norm2": "norm2",
}
_QKV, _FC1 = ".attn.qkv_proj", ".mlp.fc1"


def module_name(order: Order, module: str) -> str:
    """The file's name of a native module; for Diffusers, of one that is a single tensor there."""
    if order is not Order.DIFFUSERS:
        return module
    if module in _TOP:
        return _TOP[module]
    block, inner = _split_block(module)
    return f"{block}.{_IN_BLOCK[inner]}"


def pieces(order: Order, module: str, rows: int, heads: int) -> list[tuple[str, torch.Tensor]]:
    """The file's tensors that make up a native linear of ``rows`` rows: names and the native rows that each holds."""
    every = torch.arange(rows)
    if order is Order.NATIVE:
        return [(module, every)]
    if module.endswith(_QKV):
        thirds = model_rows(module, rows, heads)
        if order is Order.COMFY:
            return [(module, thirds)]
        block, _ = _split_block(module)
        return [(f"{block}.attn.to_{part}", third) for part, third in zip("qkv", thirds.chunk(3), strict=True)]
    if order is Order.DIFFUSERS and module.endswith(_FC1):
        gate, up = every.chunk(2)
        every = torch.cat((up, gate))
    return [(module_name(order, module), every)]


def model_rows(module: str, rows: int, heads: int) -> torch.Tensor:
    """The native rows of a linear in the order in which the model keeps them."""
    every = torch.arange(rows)
    return every.view(heads, 3, -1).transpose(0, 1).flatten() if module.endswith(_QKV) else every


def _split_block(module: str) -> tuple[str, str]:
    """``blocks.3.attn.out_proj`` to ``transformer_blocks.3`` and ``attn.out_proj``."""
    refiner = module.startswith("token_refiner.")
    index, _, inner = module.removeprefix("token_refiner.").removeprefix("blocks.").partition(".")
    return f"{'token_refiner.refiner_blocks' if refiner else 'transformer_blocks'}.{index}", inner
