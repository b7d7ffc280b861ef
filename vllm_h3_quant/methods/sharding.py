"""Codes and scales as HSDP can shard them.

HSDP is FSDP2: each rank keeps a piece of every parameter of the DiT, cut along dimension 0, and the pieces are
gathered as bytes right before the forward that needs them. FSDP2 cuts contiguous parameters only, and the
engine leaves a parameter that is not floating point whole on every rank. So a linear with ``N'`` padded outputs
and ``K'`` padded inputs is kept by rows, INT8 codes under the name of the other 8-bit dtype:

================  ==============================  ===================================
parameter         for a product                   by rows
================  ==============================  ===================================
``weight``        (K', N'), (1, K'), e4m3, int8   (N', K'), contiguous, always e4m3
``weight_scale``  (1, N'), fp32                   (N', 1), fp32
================  ==============================  ===================================

Both ways are views of the same bytes: nothing is copied, and no code is read as a number of the other dtype.
An e4m3 parameter also tells the engine to gather every parameter of the DiT in its own dtype.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from vllm.model_executor.layers.linear import LinearBase

from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.methods.lora import codes_parameter


def store_by_rows(layer: LinearBase, name: str) -> None:
    """Replace ``weight`` and ``weight_scale`` of a quantized linear by their views by rows.

    Args:
        layer: holds both as a product takes them.
        name: the layer's name, for errors about its weight.
    """
    rows = layer.weight.data.t().view(torch.float8_e4m3fn)
    layer.register_parameter("weight", codes_parameter(rows, name))
    layer.register_parameter("weight_scale", Parameter(layer.weight_scale.data.t(), requires_grad=False))


def operands_by_rows(layer: LinearBase, dtype: torch.dtype, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """``weight`` and ``weight_scale`` as a product takes them, views of what :func:`store_by_rows` left.

    Args:
        layer: inside the forward that its parameters were gathered for, or not sharded at all.
        dtype: of the codes.
        name: the layer's name, for the error.

    Raises:
        H3QuantError: the parameters are pieces: the linear runs outside the forward of its HSDP block.
    """
    if isinstance(layer.weight, DTensor):
        raise H3QuantError(
            f"{name} holds one rank's piece of its codes: under HSDP a linear runs inside the forward of its block"
            " or of the transformer, not by itself"
        )
    return layer.weight.view(dtype).t(), layer.weight_scale.t()
