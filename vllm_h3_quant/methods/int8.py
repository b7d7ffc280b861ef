"""``h3_int8``: INT8 weights per output channel, INT8 activations per token, after a rotation."""

from __future__ import annotations

from vllm_h3_quant.config.schema import Method
from vllm_h3_quant.log import get_logger
from vllm_h3_quant.methods.base import H3LinearMethod
from vllm_h3_quant.methods.formats import FORMATS
from vllm_h3_quant.methods.rotation import rotation_for

logger = get_logger(__name__)


class H3Int8LinearMethod(H3LinearMethod):
    """INT8 linear. INT8 spends its codes evenly, so one large channel costs all others their
    precision; a group-wise Hadamard rotation of the input dimension spreads it first.
    """

    fmt = FORMATS[Method.INT8]

    def choose_rotation(self, input_size: int) -> int:
        wanted = self.options.rotation
        group = rotation_for(self.options, input_size)
        if group != wanted:
            found = f"groups of {group}" if group else "no rotation"
            logger.info_once("rotation=%d does not divide %d inputs: %s there", wanted, input_size, found)
        return group
