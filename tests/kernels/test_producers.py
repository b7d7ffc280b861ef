"""Producers against the engine's own kernels followed by quantization, byte by byte.

The Triton kernels, the engine's too, run under the interpreter on a CPU and natively on a GPU.
"""

from __future__ import annotations

import engine_kernels
import pytest
import torch

from vllm_h3_quant.kernels.formats import FP8
from vllm_h3_quant.kernels.producers import gate_norm_modulate, norm_modulate
from vllm_h3_quant.kernels.producers.activation import swiglu, swiglu_reference, swiglu_triton
from vllm_h3_quant.kernels.quantize import quantize_rows_triton
from vllm_h3_quant.kernels.rows import QuantizedRows, RowFormat

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
ROW_FORMATS = pytest.mark.parametrize(
    "row_format", [RowFormat("fp8", 0), RowFormat("int8", 0), RowFormat("int8", 256)], ids=str
)
VECTORS = 6
EPS = 1e-5


def residual_stream(rows: int, hidden: int) -> torch.Tensor:
    """Random rows, and one each: zeros, outlier channels, huge, tiny, with a square beyond fp32, infinite, NaN."""
    x = torch.randn(rows, hidden, generator=torch.Generator().manual_seed(hidden))
    x[0] = 0.0
    x[1, :8] *= 300
    x[2] *= 1e4
    x[3] *= 1e-20
    x[4] *= 1e30
    x[5, hidden // 2] = float("inf")
    x[6, hidden // 3] = float("nan")
    return x.bfloat16().to(DEVICE)


def adaln(hidden: int) -> tuple[torch.Tensor, ...]:
    """A norm's weight, and shift, scale and gate as views of one projection, as the block has them."""
    generator = torch.Generator().manual_seed(1)
    vectors = torch.randn(VECTORS, 3 * hidden, generator=generator).bfloat16().to(DEVICE)
    weight = (1 + 0.3 * torch.randn(hidden, generator=generator)).bfloat16().to(DEVICE)
    return weight, *vectors.chunk(3, dim=-1)


def chosen(rows: int) -> torch.Tensor:
    return (torch.arange(rows) % VECTORS).to(DEVICE)


def same_rows(found: QuantizedRows, values: torch.Tensor) -> None:
    codes, scale = quantize_rows_triton(values, found.format.fmt, rotation=found.format.rotation)
    assert found.dtype is values.dtype
    assert torch.equal(found.codes.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(found.scale.nan_to_num(nan=-1.0), scale.nan_to_num(nan=-1.0))


@ROW_FORMATS
@pytest.mark.parametrize("hidden", [256, 1280, 5376])
def test_norm_and_modulation(row_format: RowFormat, hidden: int) -> None:
    x, (weight, shift, scale, _), indices = residual_stream(9, hidden), adaln(hidden), chosen(9)
    found = norm_modulate(x, weight, shift, scale, indices, EPS, row_format)
    same_rows(found, engine_kernels.norm_modulate(x, weight, shift, scale, indices, EPS))


@ROW_FORMATS
@pytest.mark.parametrize("hidden", [256, 5376])
def test_gated_residual_norm_and_modulation(row_format: RowFormat, hidden: int) -> None:
    x, (weight, shift, scale, gate), indices = residual_stream(9, hidden), adaln(hidden), chosen(9)
    branch = residual_stream(10, hidden)[1:].flip(0)
    updated, found = gate_norm_modulate(x, gate, branch, weight, shift, scale, indices, EPS, row_format)
    wanted, values = engine_kernels.gate_norm_modulate(x, gate, branch, weight, shift, scale, indices, EPS)
    assert torch.equal(updated.view(torch.uint8), wanted.view(torch.uint8))
    same_rows(found, values)


def test_no_rows() -> None:
    weight, shift, scale, gate = adaln(256)
    x, indices = torch.empty(0, 256, dtype=torch.bfloat16, device=DEVICE), chosen(0)
    rows = norm_modulate(x, weight, shift, scale, indices, EPS, RowFormat("fp8", 0))
    assert rows.shape == (0, 256)
    assert rows.scale.shape == (0, 1)
    updated, rows = gate_norm_modulate(x, gate, x, weight, shift, scale, indices, EPS, RowFormat("int8", 256))
    assert updated.shape == rows.shape == (0, 256)
    assert swiglu(x, RowFormat("fp8", 0)).shape == (0, 128)


def same_codes(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Equal bytes, but for the sign of an e4m3 zero, which the quotient by multiplications need not keep."""
    one, other = (codes.view(torch.uint8).masked_fill(codes.float() == 0, 0) for codes in (found, wanted))
    return torch.equal(one, other)


class TestSwiglu:
    @ROW_FORMATS
    @pytest.mark.parametrize("width", [256, 1280, 14336])
    def test_kernel_gives_the_reference_bytes(self, row_format: RowFormat, width: int) -> None:
        x = torch.cat((residual_stream(9, width), residual_stream(11, width)[2:].flip(0)), dim=1)
        # 1e30 squared is an infinite product; the row keeps its other bytes.
        found, wanted = (run(x, row_format.fmt, row_format.rotation) for run in (swiglu_triton, swiglu_reference))
        assert same_codes(found[0], wanted[0])
        assert torch.equal(found[1].nan_to_num(nan=-1.0), wanted[1].nan_to_num(nan=-1.0))

    @pytest.mark.parametrize("every", [592, pytest.param(37, marks=pytest.mark.exhaustive)])
    def test_gates_one_by_one(self, every: int) -> None:
        """A row with one gate: its scale tells the product to all bits of bf16. All 65,536 of them on a GPU."""
        bits = torch.arange(0, 2**16, 1 if ON_GPU else every, dtype=torch.int32).to(torch.int16)
        x = torch.zeros(len(bits), 32, dtype=torch.bfloat16)
        x[:, 3], x[:, 19] = bits.view(torch.bfloat16), 1.0
        x = x.to(DEVICE)
        found, wanted = swiglu_triton(x, FP8, 0), swiglu_reference(x, FP8, 0)
        differ = (found[1].nan_to_num(nan=-1.0) != wanted[1].nan_to_num(nan=-1.0)).flatten().nonzero().flatten()
        assert not len(differ), f"gates {x[differ, 3].tolist()}"
        assert same_codes(found[0], wanted[0])
