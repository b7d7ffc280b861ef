"""Leaves unquantized weights where they are on the CPU.

Why: vLLM's CPU platform packs an unquantized weight into ``layer.cpu_linear`` and leaves an empty
tensor in ``layer.weight``, while H3's text encoder slices ``layer.weight`` and offloading moves it.
Symbols: ``dispatch_cpu_unquantized_gemm(layer, remove_weight)``, ``cpu_unquantized_gemm`` and
``default_unquantized_gemm`` in ``vllm.model_executor.layers.utils``, vLLM 0.30.0. When they move: check
what ``UnquantizedLinearMethod.process_weights_after_loading`` calls on a CPU.
"""

from __future__ import annotations

from vllm_h3_quant.upstream.preflight import Symbol, require

_MODULE = "vllm.model_executor.layers.utils"
SYMBOLS = (
    Symbol("vllm", _MODULE, "dispatch_cpu_unquantized_gemm", ("layer", "remove_weight")),
    Symbol("vllm", _MODULE, "cpu_unquantized_gemm"),
    Symbol("vllm", _MODULE, "default_unquantized_gemm"),
)


def keep_plain_weights() -> None:
    """Make unquantized linears on the CPU call ``F.linear`` on ``layer.weight``."""
    require(SYMBOLS)
    from vllm.model_executor.layers import utils

    utils.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: None
    utils.cpu_unquantized_gemm = utils.default_unquantized_gemm
