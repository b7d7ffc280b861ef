"""vLLM-Omni's own elementwise kernels, which the producers must match bit by bit, on a GPU or interpreted.

Without a GPU vLLM hides Triton from them, and on CPU tensors they take another path with other roundings. Here their
source is executed once more with Triton in place, so that under the interpreter the kernels themselves run.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from types import ModuleType
from unittest.mock import patch

import torch
import triton
import triton.language as tl

_LAYERS = "vllm_omni.diffusion.layers"


@cache
def _module(name: str) -> ModuleType:
    spec = importlib.util.find_spec(f"{_LAYERS}.{name}")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with patch.multiple("vllm.triton_utils", tl=tl, triton=triton, HAS_TRITON=True):
        spec.loader.exec_module(module)
    return module


def norm_modulate(
    x: torch.Tensor, weight: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, indices: torch.Tensor, eps: float
) -> torch.Tensor:
    out = torch.empty_like(x)
    rows, hidden = x.shape
    _module("indexed_modulation")._rms_norm_indexed_scale_shift_kernel[(rows,)](
        out, x, weight, shift, scale, indices, hidden, eps,
        x.stride(0), shift.stride(0), scale.stride(0), indices.stride(0), 0,
        block_n=triton.next_power_of_2(hidden), num_warps=8,
    )  # fmt: skip
    return out


def gate_norm_modulate(
    residual: torch.Tensor,
    gate: torch.Tensor,
    branch: torch.Tensor,
    weight: torch.Tensor,
    shift: torch.Tensor,
    scale: torch.Tensor,
    indices: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    updated, out = torch.empty_like(residual), torch.empty_like(residual)
    rows, hidden = residual.shape
    _module("indexed_modulation")._indexed_gate_rms_norm_scale_shift_kernel[(rows,)](
        updated, out, residual, gate, branch, weight, shift, scale, indices, hidden, eps,
        residual.stride(0), gate.stride(0), branch.stride(0), shift.stride(0), scale.stride(0), indices.stride(0), 0,
        block_n=triton.next_power_of_2(hidden), num_warps=8,
    )  # fmt: skip
    return updated, out


def norm_rope(x: torch.Tensor, weight: torch.Tensor, table: torch.Tensor, eps: float) -> torch.Tensor:
    out: torch.Tensor = _module("fused_qk_norm_rope")._launch_fused_rms_norm_rope(x, weight, table, eps)
    return out
