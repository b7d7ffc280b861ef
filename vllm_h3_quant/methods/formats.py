"""Which codes a method makes."""

from __future__ import annotations

from vllm_h3_quant.config.schema import Method
from vllm_h3_quant.kernels.formats import FP8, INT8, CodeFormat

FORMATS: dict[Method, CodeFormat] = {Method.FP8: FP8, Method.INT8: INT8}
