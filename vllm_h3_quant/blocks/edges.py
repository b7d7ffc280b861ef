"""Which edges of a block are fused, and why the others are not.

An edge leads from what produces an activation to what takes its codes. The questions are asked at each forward, because
a LoRA may wrap a linear between two requests, and once after loading, for the report.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from torch.nn import Module
from vllm.model_executor.layers.linear import LinearBase

from vllm_h3_quant.attention.implementation import QuantizedAttention
from vllm_h3_quant.methods.base import H3LinearMethod
from vllm_h3_quant.upstream.attention import exchanges


class Edge(str, Enum):
    """The edges of one block, in the order in which they run."""

    QKV = "norm -> qkv_proj"
    ATTENTION = "qkv_proj -> attention"
    OUT = "attention -> out_proj"
    FC1 = "norm -> fc1"
    FC2 = "SwiGLU -> fc2"


NOT_ASKED = "fuse: false"
NOT_OURS = "not quantized by this package"
WRAPPED = "wrapped, as by a LoRA"
HOOKED = "a hook takes the activation"
PADDED = "inputs are padded"
STOCK_ATTENTION = "the engine's attention"
GATED = "attention with a gate of its own"
EXCHANGED = "ranks exchange heads and tokens"
SHAPE = "head size or rotation that the kernel does not take"
ROWS_LATER = "INT8 attention writes a head at a time, a row's scale spans all"

HEAD_SIZE, TURNED = 128, 96
"""Channels of a head and those that RoPE turns, where the engine's kernel is the one that ours matches."""


def wants_fusion(block: Any) -> bool:
    """Whether any linear of a block is quantized by this package and asks for fusion."""
    attn, mlp = block.attn, block.mlp
    return any(_asks(layer) for layer in (attn.qkv_proj, attn.out_proj, mlp.fc1, mlp.fc2))


def _asks(layer: Any) -> bool:
    method = getattr(layer, "quant_method", None)
    return isinstance(method, H3LinearMethod) and method.options.fuse


def linear_obstacle(layer: Any) -> str | None:
    """Why a linear must get the activation itself, or None."""
    if not isinstance(layer, LinearBase):
        return WRAPPED
    method = layer.quant_method
    if not isinstance(method, H3LinearMethod):
        return NOT_OURS
    if not method.options.fuse:
        return NOT_ASKED
    if is_hooked(layer):
        return HOOKED
    if method.aligned(layer.input_size_per_partition) != layer.input_size_per_partition:
        return PADDED
    return None


def is_hooked(module: Module) -> bool:
    """Whether something watches or replaces the calls of a module."""
    return bool(module._forward_pre_hooks or module._forward_hooks or "forward" in vars(module))


def attention_obstacle(attn: Any) -> str | None:
    """Why a block's attention keeps the engine's norm, rotation and layer, or None.

    Args:
        attn: the block's ``MiniMaxH3Attention``.
    """
    if is_hooked(attn) or is_hooked(attn.attention):
        return HOOKED
    if not isinstance(attn.attention.attention, QuantizedAttention):
        return STOCK_ATTENTION
    if attn.to_gate_compress is not None:
        return GATED
    if exchanges(attn.attention):
        return EXCHANGED
    if attn.head_dim != HEAD_SIZE or attn.rot_dim != TURNED:
        return SHAPE
    return None


def obstacles(block: Any) -> dict[Edge, str | None]:
    """Why each edge of a block is not fused; None where it is."""
    attn, mlp = block.attn, block.mlp
    attention = attention_obstacle(attn) if wants_fusion(block) else NOT_ASKED
    out = linear_obstacle(attn.out_proj) or attention
    if out is None and attn.attention.attention.kind == "int8":
        out = ROWS_LATER
    return {
        Edge.QKV: linear_obstacle(attn.qkv_proj) or _hook(attn),
        Edge.ATTENTION: attention,
        Edge.OUT: out,
        Edge.FC1: linear_obstacle(mlp.fc1) or _hook(mlp),
        Edge.FC2: linear_obstacle(mlp.fc2) or _hook(mlp) or _hook(mlp.act_fn),
    }


def _hook(module: Module) -> str | None:
    return HOOKED if is_hooked(module) else None
