"""8-bit matrix product with row and column scales.

``out[m, n] = (sum_k a[m, k] * b[k, n]) * scale_a[m] * scale_b[n] + bias[n]``, accumulated in fp32
(FP8) or exactly in int32 (INT8), rounded once to the output dtype.

Which backend serves which format and compute capability is the table :data:`BACKENDS`; the first
that fits is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_h3_quant.kernels.formats import FP8, INT8, CodeFormat

Capability = tuple[int, int]
Gemm = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.dtype],
    torch.Tensor,
]


@dataclass(frozen=True)
class Backend:
    """One implementation of the scaled product.

    Attributes:
        name: as printed in logs and reports; no two backends share one.
        fmt: the code format of both operands.
        capabilities: first served CUDA compute capability and the first one past the range, or None
            for a backend of the CPU.
        alignment: K and N must be multiples of this; the weight is padded with zeros at load.
        run: ``(a, b, scale_a, scale_b, bias, out_dtype)`` with ``a`` ``(M, K)`` contiguous, ``b``
            ``(K, N)`` with stride ``(1, K)``, ``scale_a`` ``(M, 1)`` and ``scale_b`` ``(1, N)`` fp32.
        missing: why the backend cannot be used in this process, or None.
    """

    name: str
    fmt: CodeFormat
    capabilities: tuple[Capability, Capability] | None
    alignment: int
    run: Gemm
    missing: Callable[[], str | None] = lambda: None

    def refusal(self, capability: Capability | None) -> str | None:
        """Why this backend does not serve ``capability`` (None is the CPU); None when it does."""
        if self.capabilities is None:
            return None if capability is None else "runs on the CPU only"
        if capability is None:
            return "needs a CUDA device"
        first, end = self.capabilities
        if capability < first:
            return f"needs sm_{_sm(first)} or above"
        if capability >= end:
            return f"is not built for sm_{_sm(end)} and above"
        return self.missing()


def scaled_gemm(
    backend: Backend,
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Run ``backend`` as one operator that torch.compile knows; arguments as in :attr:`Backend.run`."""
    return _scaled_gemm_op(a, b, scale_a, scale_b, bias, out_dtype, backend.name)


@torch.library.custom_op(
    "h3_quant::scaled_gemm",
    mutates_args=(),
    schema="(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias, ScalarType out_dtype, str backend)"
    " -> Tensor",
)
def _scaled_gemm_op(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    backend: str,
) -> torch.Tensor:
    run = next(candidate.run for candidate in BACKENDS if candidate.name == backend)
    return run(a, b, scale_a, scale_b, bias, out_dtype)


@_scaled_gemm_op.register_fake
def _(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    backend: str,
) -> torch.Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=out_dtype)


class NoBackend(LookupError):
    """No backend serves the format on the device. The message lists each with its reason."""


def select(fmt: CodeFormat, capability: Capability | None) -> Backend:
    """The first backend for ``fmt`` on a device.

    Args:
        fmt: code format.
        capability: CUDA compute capability such as ``(9, 0)``, or None for the CPU.

    Raises:
        NoBackend: with every backend of the format and why it does not fit.
    """
    reasons = []
    for backend in BACKENDS:
        if backend.fmt is not fmt:
            continue
        reason = backend.refusal(capability)
        if reason is None:
            return backend
        reasons.append(f"{backend.name} {reason}")
    raise NoBackend("; ".join(reasons))


def _sm(capability: Capability) -> int:
    return capability[0] * 10 + capability[1]


def scaled_gemm_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """The product in plain PyTorch: fp32 for FP8 codes, exact for INT8 codes."""
    product = _int8_product(a, b).float() if a.dtype is torch.int8 else a.float() @ b.float()
    return _scale(product, scale_a, scale_b, bias, out_dtype)


def _scale(
    product: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    out = product * scale_a * scale_b
    return (out if bias is None else out + bias.float()).to(out_dtype)


def _int8_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b`` of INT8 codes as int32: fp32 products, exact while ``127^2 * 1024 < 2^24``, added as integers.

    On a CPU ``torch._int_mm`` is a plain loop and far slower.
    """
    parts = zip(a.split(1024, dim=1), b.split(1024, dim=0), strict=True)
    return sum((x.float() @ y.float()).int() for x, y in parts)


def _torch_scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    # Row-wise scales come with a bf16 epilogue only.
    bias = None if bias is None else bias.to(torch.bfloat16)
    out = torch._scaled_mm(
        a, b, scale_a=scale_a, scale_b=scale_b, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return out.to(out_dtype)


def _vllm_cutlass(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    out = torch.empty(a.shape[0], b.shape[1], dtype=out_dtype, device=a.device)
    torch.ops._C.cutlass_scaled_mm(out, a, b, scale_a, scale_b, bias)
    return out


def _vllm_cutlass_missing() -> str | None:
    return None if hasattr(torch.ops._C, "cutlass_scaled_mm") else "needs vLLM's CUDA extension, which is not loaded"


def _torch_int_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    rows = a.shape[0]
    if rows <= 16:  # cuBLASLt takes more than 16 rows only
        a = torch.nn.functional.pad(a, (0, 0, 0, 17 - rows))
    return _scale(torch._int_mm(a, b)[:rows].float(), scale_a, scale_b, bias, out_dtype)


BACKENDS: tuple[Backend, ...] = (
    Backend("torch._scaled_mm row-wise", FP8, ((8, 9), (13, 0)), 16, _torch_scaled_mm),
    Backend("PyTorch reference FP8", FP8, None, 1, scaled_gemm_reference),
    Backend("vLLM CUTLASS INT8", INT8, ((8, 0), (10, 0)), 16, _vllm_cutlass, _vllm_cutlass_missing),
    Backend("torch._int_mm", INT8, ((8, 0), (13, 0)), 16, _torch_int_mm),
    Backend("PyTorch reference INT8", INT8, None, 1, scaled_gemm_reference),
)
