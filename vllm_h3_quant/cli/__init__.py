"""The ``vllm-h3-quant`` command."""
