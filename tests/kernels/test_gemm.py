"""Scaled 8-bit products and the choice of a backend."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
import types

import pytest
import torch

from vllm_h3_quant.kernels import gemm, gemm_library
from vllm_h3_quant.kernels.formats import FP8, INT8, CodeFormat
from vllm_h3_quant.kernels.product import Product
from vllm_h3_quant.kernels.quantize import quantize_rows_reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FORMATS = pytest.mark.parametrize("fmt", [FP8, INT8], ids=lambda fmt: fmt.name)


def operands(fmt: CodeFormat, m: int = 7, n: int = 24, k: int = 208) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(m * n * k)
    a, scale_a = quantize_rows_reference(torch.randn(m, k, generator=generator), fmt)
    b, scale_b = quantize_rows_reference(torch.randn(n, k, generator=generator), fmt)
    return a, b.t(), scale_a, scale_b.t()


@FORMATS
@pytest.mark.parametrize("with_bias", [False, True])
def test_reference_against_fp64_of_the_same_codes(fmt: CodeFormat, with_bias: bool) -> None:
    """fp32 sums of K products: K * 2^-24 of the sum of magnitudes; INT8 sums are exact. Then one bf16 rounding."""
    a, b, scale_a, scale_b = operands(fmt)
    bias = torch.randn(b.shape[1], generator=torch.Generator().manual_seed(1)).bfloat16() if with_bias else None
    out = gemm_library.scaled_gemm_reference(Product(a, b, scale_a, scale_b, bias, torch.bfloat16))
    exact = (a.double() @ b.double()) * scale_a.double() * scale_b.double()
    magnitude = (a.double().abs() @ b.double().abs()) * scale_a.double() * scale_b.double()
    exact = exact if bias is None else exact + bias.double()
    bound = exact.abs() * 2**-8 + magnitude * a.shape[1] * 2**-24
    assert out.dtype is torch.bfloat16
    assert ((out.double() - exact).abs() <= bound).all()


def test_int8_sums_are_exact_at_their_largest() -> None:
    """5384 products of 127 * 127 are past 2^24, where fp32 alone would round."""
    a = torch.full((2, 5384), 127, dtype=torch.int8)
    a[1, ::2] = -127
    b = torch.full((3, 5384), 127, dtype=torch.int8).t()
    ones = torch.ones(2, 1), torch.ones(1, 3)
    out = gemm_library.scaled_gemm_reference(Product(a, b, *ones, None, torch.float32))
    assert torch.equal(out.double(), (a.double() @ b.double()).float().double())
    assert torch.equal(gemm_library._int8_product(a, b), torch._int_mm(a, b))


@FORMATS
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_operator_is_what_compile_expects(fmt: CodeFormat, with_bias: bool) -> None:
    a, b, scale_a, scale_b = operands(fmt)
    bias = torch.zeros(b.shape[1], dtype=torch.bfloat16) if with_bias else None
    # PyTorch's schema check multiplies its operands, which e4m3 on a CPU does not do.
    checks = ("test_faketensor", "test_autograd_registration", *(("test_schema",) if fmt is INT8 else ()))
    arguments = (a, b, scale_a, scale_b, bias, torch.bfloat16)
    torch.library.opcheck(torch.ops.h3_quant.scaled_gemm.default, arguments, test_utils=checks)


def test_backend_names_are_unique() -> None:
    assert len({backend.name for backend in gemm.BACKENDS}) == len(gemm.BACKENDS)


@pytest.fixture
def everything_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table where every library can be loaded, which none is on a CPU."""
    complete = tuple(dataclasses.replace(backend, missing=lambda: None) for backend in gemm.BACKENDS)
    monkeypatch.setattr(gemm, "BACKENDS", complete)


@pytest.mark.usefixtures("everything_installed")
@pytest.mark.parametrize(
    ("fmt", "capability", "out_dtype", "name"),
    [
        (FP8, None, BF16, "PyTorch reference FP8"),
        (FP8, (8, 9), BF16, "torch._scaled_mm row-wise"),
        (FP8, (9, 0), BF16, "torch._scaled_mm row-wise"),
        (FP8, (9, 0), FP16, "vLLM CUTLASS FP8"),
        (FP8, (9, 0), FP32, "Triton FP8"),
        (FP8, (10, 0), BF16, "torch._scaled_mm row-wise"),
        (FP8, (12, 0), BF16, "torch._scaled_mm row-wise"),
        (INT8, None, BF16, "PyTorch reference INT8"),
        (INT8, (8, 0), BF16, "vLLM CUTLASS INT8"),
        (INT8, (8, 6), BF16, "vLLM CUTLASS INT8"),
        (INT8, (8, 9), FP32, "Triton INT8"),
        (INT8, (9, 0), FP16, "vLLM CUTLASS INT8"),
        (INT8, (10, 0), BF16, "torch._int_mm"),
        (INT8, (10, 3), FP32, "torch._int_mm"),
        (INT8, (12, 0), BF16, "comfy-kitchen INT8"),
        (INT8, (12, 0), FP32, "Triton INT8"),
    ],
)
def test_selection(fmt: CodeFormat, capability: tuple[int, int], out_dtype: torch.dtype, name: str) -> None:
    assert gemm.select(fmt, capability, out_dtype).name == name


@pytest.mark.usefixtures("everything_installed")
def test_a_bias_goes_where_it_is_added() -> None:
    """cuBLASLt refuses FP8 products of few rows with row scales and a bias."""
    assert gemm.select(FP8, (9, 0), biased=True).name == "vLLM CUTLASS FP8"
    assert gemm.select(FP8, (9, 0), biased=False).name == "torch._scaled_mm row-wise"
    assert gemm.select(FP8, (12, 1), biased=True).name == "Triton FP8"
    assert gemm.select(INT8, (9, 0), biased=True).name == "vLLM CUTLASS INT8"


@pytest.mark.usefixtures("everything_installed")
@pytest.mark.parametrize(
    ("fmt", "capability", "out_dtype", "reasons"),
    [
        (FP8, (8, 6), BF16, ["torch._scaled_mm row-wise needs sm_89", "PyTorch reference FP8 runs on the CPU only"]),
        (FP8, (7, 0), BF16, ["Triton FP8 needs sm_89"]),
        (
            INT8,
            (7, 5),
            BF16,
            ["vLLM CUTLASS INT8 needs sm_80", "torch._int_mm needs sm_100"],
        ),
        (FP8, (13, 0), BF16, ["not built for sm_130"]),
        (
            INT8,
            (9, 0),
            torch.float64,
            ["Triton INT8 does not write float64"],
        ),
    ],
)
def test_refusal_lists_every_backend(
    fmt: CodeFormat, capability: tuple[int, int], out_dtype: torch.dtype, reasons: list[str]
) -> None:
    with pytest.raises(gemm.NoBackend) as caught:
        gemm.select(fmt, capability, out_dtype)
    assert all(reason in str(caught.value) for reason in reasons), str(caught.value)
    assert str(caught.value).count(";") == sum(backend.fmt is fmt for backend in gemm.BACKENDS) - 1


@pytest.mark.skipif(gemm_library.vllm_cutlass_missing() is None, reason="vLLM's CUDA extension is loaded here")
def test_a_missing_extension_moves_on_to_the_next_backend() -> None:
    assert gemm.select(INT8, (9, 0)).name == "Triton INT8"
    assert gemm.select(FP8, (9, 0), FP16).name == "Triton FP8"


def test_comfy_kitchen_says_why_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert gemm_library.comfy_kitchen_missing() == "needs comfy-kitchen, which is not installed"


def test_comfy_kitchen_without_the_kernel_is_no_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extension is private to the package: a release may drop the kernel."""
    backends = types.ModuleType("comfy_kitchen.backends")
    backends.cuda = types.SimpleNamespace(_C=object())
    monkeypatch.setitem(sys.modules, "comfy_kitchen", types.ModuleType("comfy_kitchen"))
    monkeypatch.setitem(sys.modules, "comfy_kitchen.backends", backends)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert "cutlass_int8_dequant" in str(gemm_library.comfy_kitchen_missing())
