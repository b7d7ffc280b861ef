"""Per-row quantization: the reference against its definition, the Triton kernel against the reference.

The Triton kernel runs under the interpreter on a CPU and natively on a GPU.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_h3_quant.kernels.formats import FP8, INT8, CodeFormat
from vllm_h3_quant.kernels.quantize import (
    AMAX_MIN,
    quantize_rows_reference,
    quantize_rows_triton,
    row_divisors,
    tiles,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMATS = pytest.mark.parametrize("fmt", [FP8, INT8], ids=lambda fmt: fmt.name)


def awkward_rows(width: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Rows from 1e-3 to 1e3, and one each: zeros, tiny, infinite, NaN, near the largest bf16, one huge channel."""
    x = torch.randn(12, width, generator=torch.Generator().manual_seed(width)) * torch.logspace(-3, 3, 12)[:, None]
    x[1] = 0.0
    x[2] = 1e-38
    x[3, width // 2] = float("-inf")
    x[4, width // 3] = float("nan")
    x[5, 0] = 3e38
    x[6, width - 1] = 5e4
    return x.to(dtype).to(DEVICE)


def same_bytes(a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor]) -> None:
    for name, x, y in zip(("codes", "scales"), a, b, strict=True):
        assert x.dtype == y.dtype
        assert x.shape == y.shape
        if x.dtype is torch.float32:
            assert torch.equal(x.isnan(), y.isnan())
            x, y = x.nan_to_num(nan=0.0, posinf=torch.inf), y.nan_to_num(nan=0.0, posinf=torch.inf)
        differ = (x.contiguous().view(torch.uint8) != y.contiguous().view(torch.uint8)).nonzero()
        assert not len(differ), f"{name} differ in {len(differ)} bytes, first at {differ[0].tolist()}"


@FORMATS
@pytest.mark.parametrize("width", [16, 100, 256, 2520, 5384])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_triton_gives_the_reference_bytes(fmt: CodeFormat, width: int, dtype: torch.dtype) -> None:
    x = awkward_rows(width, dtype)
    padded = -(-width // 16) * 16
    same_bytes(quantize_rows_triton(x, fmt, padded=padded), quantize_rows_reference(x, fmt, padded=padded))


@FORMATS
@pytest.mark.parametrize(
    ("width", "group"), [(64, 2), (768, 16), (768, 64), (768, 256), (1280, 256), (2048, 512), (5376, 256)]
)
def test_triton_gives_the_reference_bytes_after_rotation(fmt: CodeFormat, width: int, group: int) -> None:
    x = awkward_rows(width)
    same_bytes(quantize_rows_triton(x, fmt, rotation=group), quantize_rows_reference(x, fmt, rotation=group))


@FORMATS
def test_strided_rows_and_columns(fmt: CodeFormat) -> None:
    wide = awkward_rows(300)
    for view in (wide[:, 7:135], wide[::3, ::2], wide.t()[:64]):
        expected = quantize_rows_reference(view.contiguous(), fmt)
        same_bytes(quantize_rows_triton(view, fmt), expected)
        same_bytes(quantize_rows_reference(view, fmt), expected)


@FORMATS
def test_given_divisors_are_used(fmt: CodeFormat) -> None:
    x = awkward_rows(128)
    for rotation in (0, 32):
        divisor = row_divisors(x, fmt, rotation=rotation) * 2
        expected = quantize_rows_reference(x, fmt, rotation=rotation, divisor=divisor)
        same_bytes(quantize_rows_triton(x, fmt, rotation=rotation, divisor=divisor), expected)


@FORMATS
def test_row_divisors_are_those_of_quantize_rows(fmt: CodeFormat) -> None:
    x = awkward_rows(256)
    for rotation in (0, 64):
        given = row_divisors(x, fmt, rotation=rotation)
        same_bytes(
            quantize_rows_reference(x, fmt, rotation=rotation, divisor=given),
            quantize_rows_reference(x, fmt, rotation=rotation),
        )


@FORMATS
@pytest.mark.parametrize("rotation", [0, 64])
def test_the_operator_is_what_compile_expects(fmt: CodeFormat, rotation: int) -> None:
    torch.library.opcheck(torch.ops.h3_quant.quantize_rows.default, (awkward_rows(128)[5:], fmt.name, rotation, 144))


@FORMATS
def test_no_rows(fmt: CodeFormat) -> None:
    x = torch.empty(0, 64, dtype=torch.bfloat16, device=DEVICE)
    codes, scale = quantize_rows_triton(x, fmt)
    assert codes.shape == (0, 64)
    assert scale.shape == (0, 1)


@FORMATS
def test_special_rows(fmt: CodeFormat) -> None:
    x = awkward_rows(64)
    codes, scale = quantize_rows_reference(x, fmt)
    restored = codes.float() * scale
    assert not restored[1].any(), "zeros stay zeros"
    assert restored[2].abs().max() <= AMAX_MIN, "tiny values vanish and leave a normal scale"
    assert torch.isfinite(scale[2]).all()
    assert codes[3, 32].float() == -fmt.max, "infinity saturates with its sign"
    assert restored[4].isnan().all(), "a NaN marks its whole row"
    assert not restored[3].isnan().any(), "an infinity leaves its row without NaN"
    assert torch.isfinite(restored[[0, 1, 2, *range(5, 12)]]).all(), "and both leave the other rows alone"


@FORMATS
@given(seed=st.integers(0, 2**31), width=st.integers(1, 700), exponent=st.integers(-25, 30))
@settings(max_examples=60, deadline=None)
def test_error_bound(fmt: CodeFormat, seed: int, width: int, exponent: int) -> None:
    """INT8: half a step of ``amax / 127``. e4m3: 2^-4 of the value, or half the subnormal step 2^-9 of a scale.

    Both plus the rounding of one fp32 division and one product (2^-22).
    """
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    codes, scale = quantize_rows_reference(x, fmt)
    error = (codes.double() * scale.double() - x.double()).abs()
    step = 0.5 * scale.double() if fmt is INT8 else torch.maximum(x.double().abs() * 2**-4, scale.double() * 2**-10)
    assert (error <= step * (1 + 2**-20) + x.double().abs() * 2**-22).all()


@FORMATS
def test_divisors_have_16_bits_and_are_no_smaller_than_the_exact_ones(fmt: CodeFormat) -> None:
    """16 bits are what makes the kernel's division exact; rounding up keeps ``y / divisor`` within the codes."""
    x = torch.randn(4096, 8, generator=torch.Generator().manual_seed(0)) * torch.logspace(-20, 20, 4096)[:, None]
    divisor = row_divisors(x, fmt)[:, 0]
    exact = x.double().abs().amax(dim=1) / fmt.max
    assert not (divisor.view(torch.int32) & 0xFF).any()
    assert (divisor.double() >= exact * (1 - 2**-24)).all()
    assert (divisor.double() <= exact * (1 + 2**-15)).all()


@FORMATS
def test_two_multiplications_give_the_codes_of_the_division(fmt: CodeFormat) -> None:
    """The kernel's quotient beside every tie between two codes, where one fp32 step decides the code.

    fp64 holds the products exactly; the interpreter has no fused multiply-add, so the steps are repeated here.
    """
    generator = torch.Generator().manual_seed(0)
    significand = torch.randint(2**15, 2**16, (4096, 1, 1), generator=generator).float()
    significand[:3, 0, 0] = torch.tensor([2**15, 2**15 + 1, 2**16 - 1])
    divisor = significand * 2.0 ** torch.randint(-90, 60, (4096, 1, 1), generator=generator)
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(fmt.dtype).float()
    codes = every[torch.isfinite(every) & (every >= 0)].unique()
    ties = (codes[1:] + codes[:-1]) / 2
    beside = (ties.view(1, -1, 1) * divisor).view(torch.int32) + torch.arange(-3, 4, dtype=torch.int32)
    y = beside.view(torch.float32)

    reciprocal = 1.0 / divisor
    rest = (1.0 - reciprocal.double() * divisor.double()).float() * reciprocal
    quotient = (y.double() * reciprocal.double() + (y * rest).double()).float()

    def encode(q: torch.Tensor) -> torch.Tensor:
        return (q.round() if fmt is INT8 else q.clamp(-fmt.max, fmt.max)).to(fmt.dtype).view(torch.uint8)

    assert torch.equal(encode(quotient), encode(y / divisor))
    # One multiplication is not enough: the test can tell.
    assert not torch.equal(encode(y * reciprocal), encode(y / divisor))


@pytest.mark.parametrize("rotation", [0, 2, 16, 64, 256, 512])
def test_tiles_cover_the_row(rotation: int) -> None:
    for width in range(max(rotation, 1), 30000, max(rotation, 7)):
        first, second, warps = tiles(width, rotation)
        assert first + second >= width
        assert all(size & (size - 1) == 0 for size in (first, second, warps))
        assert first >= rotation
        assert not second or (rotation <= second <= first and first < width)


def test_tiles_of_the_block() -> None:
    """5376 is three quarters of 8192 and less: two tiles take less than one."""
    assert tiles(5376, 256)[:2] == (4096, 2048)
    assert tiles(7168, 256)[:2] == (8192, 0)
    assert tiles(14336, 256)[:2] == (16384, 0)
