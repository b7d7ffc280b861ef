"""Quantization of MiniMax-H3 for vLLM-Omni: online FP8 and INT8 linears, by component.

Importing the package does nothing; vLLM and vLLM-Omni reach it through the entry points in
:mod:`vllm_h3_quant.plugin`.
"""

__version__ = "0.1.0"
