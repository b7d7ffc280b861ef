"""The only place that touches symbols vLLM and vLLM-Omni do not document.

A module a patch point: why it is needed, which symbol at which version, and what to check when it
moves. Each lists its symbols in ``SYMBOLS``; :mod:`vllm_h3_quant.upstream.preflight` checks them and refuses to
start when one is gone.
"""
