"""The scaled product by the libraries at hand, and in plain PyTorch."""

from __future__ import annotations

import importlib.util
from typing import Protocol

import torch

from vllm_h3_quant.kernels.product import Product


def scaled_gemm_reference(product: Product) -> torch.Tensor:
    """The product in plain PyTorch: fp32 sums for FP8 codes, exact ones for INT8 codes."""
    a, b = product.a, product.b
    return product.scale(_int8_product(a, b).float() if a.dtype is torch.int8 else a.float() @ b.float())


def _int8_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b`` of INT8 codes as int32: fp32 products, exact while ``127^2 * 1024 < 2^24``, added as integers.

    On a CPU ``torch._int_mm`` is a plain loop and far slower.
    """
    parts = zip(a.split(1024, dim=1), b.split(1024, dim=0), strict=True)
    return sum((x.float() @ y.float()).int() for x, y in parts)


def torch_scaled_mm(product: Product) -> torch.Tensor:
    """``torch._scaled_mm`` with one scale a row and a column, for FP8 codes, bf16 output and no bias."""
    a, b, scale_a, scale_b, bias, out_dtype = product
    assert bias is None, "the table sends products with a bias elsewhere"
    return torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=out_dtype, use_fast_accum=True)


class CutlassScaledMM(Protocol):
    """vLLM's kernel: writes ``(a @ b) * scale_a * scale_b + bias`` to ``out``; shapes as of :class:`Product`."""

    def __call__(
        self,
        out: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        scale_a: torch.Tensor,
        scale_b: torch.Tensor,
        bias: torch.Tensor | None,
        /,
    ) -> None: ...


_cutlass: CutlassScaledMM | None = None


def bind_vllm_cutlass(kernel: CutlassScaledMM | None) -> None:
    """Give :func:`vllm_cutlass` its kernel; None where vLLM's extension has none. Call before the first product."""
    global _cutlass
    _cutlass = kernel


def vllm_cutlass(product: Product) -> torch.Tensor:
    """vLLM's CUTLASS kernel, for both formats and bf16 or fp16 output."""
    assert _cutlass is not None, "the table asks vllm_cutlass_missing first"
    out = product.empty_out()
    _cutlass(out, product.a, product.b, product.scale_a, product.scale_b, product.bias_as_out())
    return out


def vllm_cutlass_missing() -> str | None:
    """Why :func:`vllm_cutlass` cannot run in this process."""
    return None if _cutlass is not None else "needs vLLM's CUDA extension, which is not loaded"


def torch_int_mm(product: Product) -> torch.Tensor:
    """``torch._int_mm`` for INT8 codes, scaled afterwards."""
    a, rows = product.a, product.a.shape[0]
    if rows <= 16:  # cuBLASLt takes more than 16 rows only
        a = torch.nn.functional.pad(a, (0, 0, 0, 17 - rows))
    return product.scale(torch._int_mm(a, product.b)[:rows].float())


def comfy_kitchen_int8(product: Product) -> torch.Tensor:
    """comfy-kitchen's CUTLASS kernel for INT8 codes. Its public ``int8_linear`` quantizes the activation itself,
    so this calls the extension below it (0.2.40).

    Raises:
        RuntimeError: the kernel does not take the shape or device.
    """
    from comfy_kitchen.backends import cuda

    a, b, scale_a, scale_b, _, out_dtype = product
    out = product.empty_out()
    bias = product.bias_as_out()
    if bias is None:
        bias = out.new_empty(0)
    # Stream -1: no synchronization, which a CUDA graph could not capture.
    operands = [t.detach().__dlpack__(stream=-1) for t in (a, b.t(), scale_a, scale_b.reshape(-1), bias, out)]
    stream = torch.cuda.current_stream(a.device).cuda_stream
    if not cuda._C.cutlass_int8_dequant(*operands, cuda.DTYPE_TO_CODE[out_dtype], stream):
        raise RuntimeError(f"comfy-kitchen has no INT8 kernel for {tuple(a.shape)} x {tuple(b.shape)} on {a.device}")
    return out


def comfy_kitchen_missing() -> str | None:
    """Why :func:`comfy_kitchen_int8` cannot run in this process."""
    if importlib.util.find_spec("comfy_kitchen") is None:
        return "needs comfy-kitchen, which is not installed"
    from comfy_kitchen.backends import cuda

    if not hasattr(getattr(cuda, "_C", None), "cutlass_int8_dequant"):
        return "needs comfy-kitchen's CUDA extension with cutlass_int8_dequant"
    return None
