"""The block's elementwise steps, with codes at their end where the next linear takes them.

On a GPU a producer is one kernel, for bf16. Elsewhere, and by definition, it is the engine's step followed by
quantization.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm_omni.diffusion.layers import indexed_modulation as engine

from vllm_h3_quant.kernels import producers as kernels
from vllm_h3_quant.kernels.quantize import quantized
from vllm_h3_quant.kernels.rows import QuantizedRows, RowFormat


def has_kernel(x: torch.Tensor) -> bool:
    """Whether the producers' kernels take an activation."""
    return x.is_cuda and x.dtype is torch.bfloat16


def norm_modulate(
    x: torch.Tensor,
    norm: Any,
    shift: torch.Tensor,
    scale: torch.Tensor,
    indices: torch.Tensor,
    row_format: RowFormat | None,
) -> torch.Tensor | QuantizedRows:
    """RMSNorm and AdaLN's affine transform of ``(tokens, hidden)``.

    Args:
        x: residual stream.
        norm: its ``weight`` and ``variance_epsilon`` are used.
        shift, scale: ``(vectors, hidden)``.
        indices: ``(tokens,)`` vector of each token.
        row_format: None for values.
    """
    arguments = (x, norm.weight, shift, scale, indices, norm.variance_epsilon)
    if row_format is not None and has_kernel(x):
        return kernels.norm_modulate(*arguments, row_format)
    values: torch.Tensor = engine.rms_norm_indexed_scale_shift(*arguments)
    return values if row_format is None else quantized(values, row_format)


def gate_norm_modulate(
    residual: torch.Tensor,
    gate: torch.Tensor,
    branch: torch.Tensor,
    norm: Any,
    shift: torch.Tensor,
    scale: torch.Tensor,
    indices: torch.Tensor,
    row_format: RowFormat | None,
) -> tuple[torch.Tensor, torch.Tensor | QuantizedRows]:
    """The residual stream plus the gated branch, and that normed and modulated; see :func:`norm_modulate`."""
    arguments = (residual, gate, branch, norm.weight, shift, scale, indices, norm.variance_epsilon)
    if row_format is not None and has_kernel(residual):
        return kernels.gate_norm_modulate(*arguments, row_format)
    updated, values = engine.indexed_gate_rms_norm_scale_shift(*arguments)
    return updated, values if row_format is None else quantized(values, row_format)
