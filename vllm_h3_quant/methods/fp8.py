"""``h3_fp8``: e4m3 weights per output channel, e4m3 activations per token."""

from __future__ import annotations

from vllm_h3_quant.config.schema import Method
from vllm_h3_quant.methods.base import H3LinearMethod
from vllm_h3_quant.methods.formats import FORMATS


class H3Fp8LinearMethod(H3LinearMethod):
    """FP8 linear. e4m3 keeps its relative precision over four decades, so no rotation is needed."""

    fmt = FORMATS[Method.FP8]
