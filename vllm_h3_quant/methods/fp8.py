"""``h3_fp8``: e4m3 weights per output channel, e4m3 activations per token."""

from __future__ import annotations

from vllm_h3_quant.kernels.formats import FP8
from vllm_h3_quant.methods.base import H3LinearMethod


class H3Fp8LinearMethod(H3LinearMethod):
    """FP8 linear. e4m3 keeps its relative precision over four decades, so no rotation is needed."""

    fmt = FP8
