"""Which rotation a linear's codes are made after."""

from __future__ import annotations

from vllm_h3_quant.config.schema import H3QuantOptions, Method
from vllm_h3_quant.kernels.hadamard import largest_group


def rotation_for(options: H3QuantOptions, inputs: int) -> int:
    """Width of the Hadamard groups of a linear with ``inputs`` inputs: the widest that fits; 0 for none."""
    if options.method is not Method.INT8 or not options.rotation:
        return 0
    return largest_group(inputs, options.rotation)
