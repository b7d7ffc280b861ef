"""Kernels that write codes where others write activations.

Each gives the bytes of the plain kernel followed by :func:`vllm_h3_quant.kernels.quantize.quantize_rows`: a value
is computed in the plain kernel's order and rounded to the activation's dtype before it is quantized.
"""

from vllm_h3_quant.kernels.producers.activation import swiglu
from vllm_h3_quant.kernels.producers.modulate import gate_norm_modulate, norm_modulate

__all__ = ["gate_norm_modulate", "norm_modulate", "swiglu"]
