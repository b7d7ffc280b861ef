"""Which GEMM backend the current device offers a method, told before any weight is read."""

from __future__ import annotations

from functools import cache

from vllm.platforms import current_platform

from vllm_h3_quant.config.schema import Method
from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.kernels.backend import Capability, NoBackend, told
from vllm_h3_quant.kernels.gemm import BACKENDS, Backend, select
from vllm_h3_quant.kernels.gemm_library import bind_vllm_cutlass
from vllm_h3_quant.methods.formats import FORMATS
from vllm_h3_quant.upstream.scaled_mm import cutlass_scaled_mm


def device_capability() -> Capability | None:
    """Compute capability of the current CUDA device; None on the CPU platform. Does not start CUDA.

    Raises:
        H3QuantError: the platform is neither.
    """
    if current_platform.is_cpu():
        return None
    if not current_platform.is_cuda():
        raise H3QuantError(
            f"the methods of this package run on NVIDIA GPUs and on the CPU reference platform, not on {device_name()}"
        )
    capability = current_platform.get_device_capability()
    return capability.major, capability.minor


def device_name() -> str:
    """The device's name for messages."""
    return str(current_platform.get_device_name())


def lowest_capability(method: Method) -> int:
    """The lowest compute capability that serves ``method``, such as 89 for sm_89."""
    fmt = FORMATS[method]
    major, minor = min(backend.capabilities[0] for backend in BACKENDS if backend.fmt is fmt and backend.capabilities)
    return 10 * major + minor


def bind_engine_kernels() -> None:
    """Hand vLLM's kernels to the table of products, which goes without them before. Call before the first product."""
    bind_vllm_cutlass(cutlass_scaled_mm())


@cache
def backend_for(method: Method, *, biased: bool = False) -> Backend:
    """The backend that serves a linear of ``method`` here, with or without a bias.

    Raises:
        H3QuantError: the device cannot; the message names it, each backend's reason and a method
            that the device does serve.
    """
    capability = device_capability()
    if capability is not None:
        bind_engine_kernels()
    try:
        return select(FORMATS[method], capability, biased=biased)
    except NoBackend as error:
        others = [other.value for other in Method if other is not method and serves(other, capability)]
        instead = f"use {others[0]} instead" if others else "no method of this package runs on it"
        raise H3QuantError(
            f"{method.value} cannot run on {told(device_name(), capability)}: {error}; {instead}"
        ) from None


def serves(method: Method, capability: Capability | None) -> bool:
    """Whether any backend serves ``method`` on a device of this capability."""
    try:
        select(FORMATS[method], capability)
    except NoBackend:
        return False
    return True
