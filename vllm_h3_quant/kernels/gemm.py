"""8-bit matrix product with row and column scales.

``out[m, n] = (sum_k a[m, k] * b[k, n]) * scale_a[m] * scale_b[n] + bias[n]``, accumulated in fp32
(FP8) or exactly in int32 (INT8), rounded once to the output dtype.

Which backend serves which format, compute capability and output dtype is the table :data:`BACKENDS`;
the first that fits is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from vllm_h3_quant.kernels import gemm_library as library
from vllm_h3_quant.kernels.backend import Capability, NoBackend, nothing_missing, out_of_range
from vllm_h3_quant.kernels.formats import FP8, INT8, CodeFormat
from vllm_h3_quant.kernels.gemm_triton import scaled_gemm_triton
from vllm_h3_quant.kernels.product import Product

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Backend:
    """One implementation of the scaled product.

    Attributes:
        name: as printed in logs and reports; no two backends share one.
        fmt: the code format of both operands.
        capabilities: first served CUDA compute capability and the first one past the range, or None
            for a backend of the CPU.
        alignment: K and N must be multiples of this; the weight is padded with zeros at load.
        out_dtypes: what it rounds to.
        run: computes a product.
        missing: why the backend cannot be used in this process, or None.
        takes_bias: whether it adds a bias.
    """

    name: str
    fmt: CodeFormat
    capabilities: tuple[Capability, Capability] | None
    alignment: int
    out_dtypes: tuple[torch.dtype, ...]
    run: Callable[[Product], torch.Tensor]
    missing: Callable[[], str | None] = nothing_missing
    takes_bias: bool = True

    def refusal(
        self, capability: Capability | None, out_dtype: torch.dtype = BF16, *, biased: bool = False
    ) -> str | None:
        """Why this backend does not serve ``capability`` (None is the CPU) and the product; None when it does."""
        reason = out_of_range(self.capabilities, capability)
        if reason is not None or self.capabilities is None:
            return reason
        if out_dtype not in self.out_dtypes:
            return f"does not write {str(out_dtype).removeprefix('torch.')}"
        if biased and not self.takes_bias:
            return "adds no bias"
        return self.missing()


def select(
    fmt: CodeFormat, capability: Capability | None, out_dtype: torch.dtype = BF16, *, biased: bool = False
) -> Backend:
    """The first backend for ``fmt`` on a device.

    Args:
        fmt: code format.
        capability: CUDA compute capability such as ``(9, 0)``, or None for the CPU.
        out_dtype: dtype of the product.
        biased: whether a bias is to be added.

    Raises:
        NoBackend: with every backend of the format and why it does not fit.
    """
    reasons = []
    for backend in BACKENDS:
        if backend.fmt is not fmt:
            continue
        reason = backend.refusal(capability, out_dtype, biased=biased)
        if reason is None:
            return backend
        reasons.append(f"{backend.name} {reason}")
    raise NoBackend("; ".join(reasons))


@torch.library.custom_op(
    "h3_quant::scaled_gemm",
    mutates_args=(),
    schema="(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias, ScalarType out_dtype) -> Tensor",
)
def scaled_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """The product by the device's backend, as one operator that torch.compile knows.

    Arguments as in :class:`Product`; K and N are multiples of the backend's alignment.

    Raises:
        NoBackend: nothing on this device takes the codes or writes ``out_dtype``.
    """
    backend = _backend_of(a.dtype, a.device, out_dtype, bias is not None)
    return backend.run(Product(a, b, scale_a, scale_b, bias, out_dtype))


@scaled_gemm.register_fake
def _(*operands: Any) -> torch.Tensor:
    return Product(*operands).empty_out()


@cache
def _backend_of(dtype: torch.dtype, device: torch.device, out_dtype: torch.dtype, biased: bool) -> Backend:
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return select(INT8 if dtype is torch.int8 else FP8, capability, out_dtype, biased=biased)


HALF = (BF16, FP16)
ANY = (*HALF, FP32)
# cuBLASLt, below torch._scaled_mm, has no kernel with row scales and a bias for K from 5376 on and few tiles of output:
# "CUBLAS_STATUS_NOT_SUPPORTED" (torch 2.11, H200). torch._int_mm writes int32 to memory and needs passes of its own for
# the scales; Triton 3.6 and 3.7 have only the old matrix instructions for INT8 on sm_100 and sm_103.
BACKENDS: tuple[Backend, ...] = (
    Backend(
        "torch._scaled_mm row-wise", FP8, ((8, 9), (13, 0)), 16, (BF16,), library.torch_scaled_mm, takes_bias=False
    ),
    Backend("vLLM CUTLASS FP8", FP8, ((8, 9), (12, 1)), 16, HALF, library.vllm_cutlass, library.vllm_cutlass_missing),
    Backend("Triton FP8", FP8, ((8, 9), (13, 0)), 16, ANY, scaled_gemm_triton),
    Backend("PyTorch reference FP8", FP8, None, 1, ANY, library.scaled_gemm_reference),
    Backend(
        "vLLM CUTLASS INT8",
        INT8,
        ((8, 0), (10, 0)),
        16,
        HALF,
        library.vllm_cutlass,
        library.vllm_cutlass_missing,
    ),
    Backend(
        "comfy-kitchen INT8",
        INT8,
        ((12, 0), (13, 0)),
        16,
        HALF,
        library.comfy_kitchen_int8,
        library.comfy_kitchen_missing,
    ),
    Backend("torch._int_mm", INT8, ((10, 0), (12, 0)), 16, ANY, library.torch_int_mm),
    Backend("Triton INT8", INT8, ((8, 0), (13, 0)), 16, ANY, scaled_gemm_triton),
    Backend("PyTorch reference INT8", INT8, None, 1, ANY, library.scaled_gemm_reference),
)
