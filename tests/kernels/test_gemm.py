"""Scaled 8-bit products and the choice of a backend."""

from __future__ import annotations

import pytest
import torch

from vllm_h3_quant.kernels import gemm
from vllm_h3_quant.kernels.formats import FP8, INT8, CodeFormat
from vllm_h3_quant.kernels.quantize import quantize_rows_reference

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
    out = gemm.scaled_gemm_reference(a, b, scale_a, scale_b, bias, torch.bfloat16)
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
    out = gemm.scaled_gemm_reference(a, b, *ones, None, torch.float32)
    assert torch.equal(out.double(), (a.double() @ b.double()).float().double())
    assert torch.equal(gemm._int8_product(a, b), torch._int_mm(a, b))


@FORMATS
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_operator_is_what_compile_expects(fmt: CodeFormat, with_bias: bool) -> None:
    a, b, scale_a, scale_b = operands(fmt)
    bias = torch.zeros(b.shape[1], dtype=torch.bfloat16) if with_bias else None
    backend = gemm.select(fmt, None).name
    # PyTorch's schema check multiplies its operands, which e4m3 on a CPU does not do.
    checks = ("test_faketensor", "test_autograd_registration", *(("test_schema",) if fmt is INT8 else ()))
    arguments = (a, b, scale_a, scale_b, bias, torch.bfloat16, backend)
    torch.library.opcheck(torch.ops.h3_quant.scaled_gemm.default, arguments, test_utils=checks)


def test_backend_names_are_unique() -> None:
    assert len({backend.name for backend in gemm.BACKENDS}) == len(gemm.BACKENDS)


@pytest.mark.parametrize(
    ("fmt", "capability", "name"),
    [
        (FP8, None, "PyTorch reference FP8"),
        (FP8, (8, 9), "torch._scaled_mm row-wise"),
        (FP8, (9, 0), "torch._scaled_mm row-wise"),
        (FP8, (10, 0), "torch._scaled_mm row-wise"),
        (FP8, (12, 0), "torch._scaled_mm row-wise"),
        (INT8, None, "PyTorch reference INT8"),
        (INT8, (8, 0), "vLLM CUTLASS INT8"),
        (INT8, (8, 6), "vLLM CUTLASS INT8"),
        (INT8, (9, 0), "vLLM CUTLASS INT8"),
        (INT8, (10, 0), "torch._int_mm"),
        (INT8, (12, 0), "torch._int_mm"),
    ],
)
def test_selection(monkeypatch: pytest.MonkeyPatch, fmt: CodeFormat, capability: tuple[int, int], name: str) -> None:
    monkeypatch.setattr(gemm, "BACKENDS", tuple(with_extension(backend) for backend in gemm.BACKENDS))
    assert gemm.select(fmt, capability).name == name


def with_extension(backend: gemm.Backend) -> gemm.Backend:
    """The same backend where vLLM's CUDA extension is loaded, which it is not on a CPU."""
    return gemm.Backend(backend.name, backend.fmt, backend.capabilities, backend.alignment, backend.run)


@pytest.mark.parametrize(
    ("fmt", "capability", "reasons"),
    [
        (FP8, (8, 6), ["torch._scaled_mm row-wise needs sm_89", "PyTorch reference FP8 runs on the CPU only"]),
        (FP8, (7, 0), ["needs sm_89"]),
        (INT8, (7, 5), ["vLLM CUTLASS INT8 needs sm_80", "torch._int_mm needs sm_80"]),
        (FP8, (13, 0), ["not built for sm_130"]),
    ],
)
def test_refusal_lists_every_backend(fmt: CodeFormat, capability: tuple[int, int], reasons: list[str]) -> None:
    with pytest.raises(gemm.NoBackend) as caught:
        gemm.select(fmt, capability)
    assert all(reason in str(caught.value) for reason in reasons), str(caught.value)


def test_a_missing_extension_moves_on_to_the_next_backend() -> None:
    if gemm._vllm_cutlass_missing() is None:
        pytest.skip("vLLM's CUDA extension is loaded here")
    assert gemm.select(INT8, (9, 0)).name == "torch._int_mm"
