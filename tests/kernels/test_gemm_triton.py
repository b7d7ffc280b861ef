"""The Triton product against the reference: under the interpreter on a CPU, natively on a GPU."""

from __future__ import annotations

import pytest
import torch

from vllm_h3_quant.kernels.formats import FP8, INT8, CodeFormat
from vllm_h3_quant.kernels.gemm_library import scaled_gemm_reference
from vllm_h3_quant.kernels.gemm_triton import Tile, scaled_gemm_triton
from vllm_h3_quant.kernels.product import Product
from vllm_h3_quant.kernels.quantize import quantize_rows_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMATS = pytest.mark.parametrize("fmt", [FP8, INT8], ids=lambda fmt: fmt.name)
SMALL = Tile(rows=32, columns=64, depth=32, warps=4, stages=3)


def operands(fmt: CodeFormat, m: int, n: int, k: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(m * n * k)
    a, scale_a = quantize_rows_reference(torch.randn(m, k, generator=generator).to(DEVICE), fmt)
    b, scale_b = quantize_rows_reference(torch.randn(n, k, generator=generator).to(DEVICE), fmt)
    return a, b.t(), scale_a, scale_b.t(), torch.randn(n, generator=generator).to(DEVICE)


def allowed(fmt: CodeFormat, a: torch.Tensor, b: torch.Tensor, *scales: torch.Tensor) -> torch.Tensor:
    """Integer sums are exact, their scales and bias are rounded a few times in fp32. fp32 sums of K products
    taken in another order differ by K * 2^-24 of the sum of magnitudes; Hopper keeps about 14 bits of a
    running FP8 sum (DeepSeek-V3 report, arXiv 2412.19437).
    """
    magnitude = (a.double().abs() @ b.double().abs()) * scales[0].double() * scales[1].double()
    step = 2**-22 if fmt is INT8 else (2**-12 if DEVICE == "cuda" else a.shape[1] * 2**-24)
    return magnitude * step + 2**-20


@FORMATS
@pytest.mark.parametrize(("m", "n", "k"), [(1, 16, 16), (7, 24, 208), (33, 72, 48), (70, 136, 80)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_odd_sizes(fmt: CodeFormat, m: int, n: int, k: int, with_bias: bool) -> None:
    a, b, scale_a, scale_b, bias = operands(fmt, m, n, k)
    given = bias if with_bias else None
    out = scaled_gemm_triton(Product(a, b, scale_a, scale_b, given, torch.float32), tile=SMALL)
    expected = scaled_gemm_reference(Product(a, b, scale_a, scale_b, given, torch.float32))
    assert out.shape == (m, n)
    assert ((out - expected).double().abs() <= allowed(fmt, a, b, scale_a, scale_b)).all()


@FORMATS
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float16,
        pytest.param(
            torch.bfloat16, marks=pytest.mark.skipif(DEVICE == "cpu", reason="Triton's interpreter truncates to bf16")
        ),
    ],
    ids=str,
)
def test_rounds_once_to_the_output_dtype(fmt: CodeFormat, dtype: torch.dtype) -> None:
    a, b, scale_a, scale_b, bias = operands(fmt, 40, 64, 96)
    exact = scaled_gemm_triton(Product(a, b, scale_a, scale_b, bias, torch.float32), tile=SMALL)
    assert torch.equal(scaled_gemm_triton(Product(a, b, scale_a, scale_b, bias, dtype), tile=SMALL), exact.to(dtype))


def test_integer_sums_past_the_mantissa_of_fp32() -> None:
    """2064 products of 127 * 127, alternating rows of signs: sums past 2^24 that fp32 alone would round."""
    a = torch.full((3, 2064), 127, dtype=torch.int8, device=DEVICE)
    a[1, ::2], a[2, 7] = -127, 126
    b = torch.full((16, 2064), 127, dtype=torch.int8, device=DEVICE).t()
    ones = torch.ones(3, 1, device=DEVICE), torch.ones(1, 16, device=DEVICE)
    out = scaled_gemm_triton(Product(a, b, *ones, None, torch.float32), tile=SMALL)
    assert torch.equal(out, (a.double() @ b.double()).float())


@FORMATS
def test_the_tile_of_the_device(fmt: CodeFormat) -> None:
    a, b, scale_a, scale_b, bias = operands(fmt, 130, 264, 144)
    out = scaled_gemm_triton(Product(a, b, scale_a, scale_b, bias, torch.float32))
    expected = scaled_gemm_reference(Product(a, b, scale_a, scale_b, bias, torch.float32))
    assert ((out - expected).double().abs() <= allowed(fmt, a, b, scale_a, scale_b)).all()
