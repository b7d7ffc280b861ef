"""8-bit attention within the documents of a packed sequence.

``out[t] = softmax(q[t] . k^T * softmax_scale) v`` over the tokens of t's own document, not causal.

Which backend serves which kind and compute capability is the table :data:`BACKENDS`. A kind names the format of the
product of Q and K: ``int8`` is the more accurate one, three times so on sharp scores, ``fp8`` takes FlashAttention-3.
"""

from vllm_h3_quant.kernels.attention.backends import BACKENDS, KINDS, SHARP_ERROR, AttentionBackend, choose, select
from vllm_h3_quant.kernels.attention.documents import TILE
from vllm_h3_quant.kernels.attention.operator import HEAD_SIZES, attend, attend_fused
from vllm_h3_quant.kernels.attention.rotary import rotary_of

__all__ = [
    "BACKENDS",
    "HEAD_SIZES",
    "KINDS",
    "SHARP_ERROR",
    "TILE",
    "AttentionBackend",
    "attend",
    "attend_fused",
    "choose",
    "rotary_of",
    "select",
]
