"""Codes to values: scales by tensor, row and block, rotations, NVFP4."""

from __future__ import annotations

import math

import pytest
import torch

from vllm_h3_quant.kernels.hadamard import hadamard_reference
from vllm_h3_quant.loader.coding import Scaled, Values
from vllm_h3_quant.loader.formats.convrot import ConvRot, regular_hadamard
from vllm_h3_quant.loader.formats.modelopt_nvfp4 import E2M1, NvFp4
from vllm_h3_quant.tiny_h3.formats import codes


@pytest.mark.parametrize("group", [4, 16, 64, 256, 1024])
def test_regular_hadamard(group: int) -> None:
    """Orthogonal, symmetric, all entries of one magnitude, equal row sums, and the Kronecker power by its digits.

    All entries are powers of two, so that every product and sum is exact.
    """
    matrix = regular_hadamard(group)
    assert torch.equal(matrix @ matrix, torch.eye(group))
    assert torch.equal(matrix, matrix.t())
    assert torch.equal(matrix.abs(), torch.full((group, group), group**-0.5))
    assert torch.equal(matrix.sum(0), torch.ones(group))
    for row, column in [(0, 0), (0, group - 1), (1, 2), (group - 1, 3), (group // 2, group // 3)]:
        sign, a, b = 1, row, column
        for _ in range(round(math.log(group, 4))):
            sign *= -1 if a % 4 + b % 4 == 3 else 1
            a, b = a // 4, b // 4
        assert matrix[row, column] == sign * group**-0.5


@pytest.mark.parametrize("group", [2, 8, 48, 3])
def test_regular_hadamard_has_orders_of_4(group: int) -> None:
    with pytest.raises(ValueError, match=f"a power of 4, not {group}"):
        regular_hadamard(group)


def test_values_are_themselves() -> None:
    raw = torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16)
    assert torch.equal(Values().decode(raw, 7), raw.float())
    assert Values().columns(5) == 5


CODES = torch.arange(-12, 12, dtype=torch.int8).reshape(4, 6)


@pytest.mark.parametrize(
    ("scale", "row_block", "column_block", "by_rows", "told"),
    [
        ([[3.0]], 4, 6, True, "codes, scale per tensor"),
        ([[1.0], [2.0], [3.0], [4.0]], 1, 6, True, "codes, scale per channel"),
        ([[1.0], [2.0]], 2, 6, True, "codes, scale per channel"),
        ([[1.0, 2.0], [3.0, 4.0]], 2, 4, False, "codes, scale by block"),
        ([[1.0, 2.0], [3.0, 4.0]], 3, 3, False, "codes, scale by block"),
    ],
)
def test_scale_of_each_place(
    scale: list[list[float]], row_block: int, column_block: int, by_rows: bool, told: str
) -> None:
    """Every row by itself, with the file's index of the row; the last block may be shorter."""
    coding = Scaled(torch.tensor(scale), row_block, column_block)
    assert (coding.by_rows, coding.describe) == (by_rows, told)
    for row in range(4):
        got = coding.decode(CODES[row : row + 1], row)
        want = [float(CODES[row, k]) * scale[row // row_block][k // column_block] for k in range(6)]
        assert got.tolist() == [want]
    if by_rows:
        assert coding.row_scale(1, 3).tolist() == [scale[row // row_block] for row in (1, 2, 3)]


def test_own_rotation_is_undone() -> None:
    """The codes' butterfly and its inverse: 16 fp32 additions of values of 16 times the largest at most."""
    weight = torch.randn(3, 512, generator=torch.Generator().manual_seed(0))
    rotated = hadamard_reference(weight, 256) / 16
    coding = Scaled(torch.full((3, 1), 2.0), 1, 512, rotation=256)
    assert coding.describe == "codes, scale per channel, rotated 256"
    assert (coding.decode(rotated / 2, 0) - weight).abs().max() <= 16 * 2**-24 * 16 * weight.abs().max()


def test_convrot_is_undone_by_its_own_matrix() -> None:
    """One code in a group spreads over it with the signs of its row."""
    raw = torch.zeros(1, 32, dtype=torch.int8)
    raw[0, 16 + 5] = 8
    coding = ConvRot(torch.tensor([[0.5]]), 1, 32, group=16)
    assert (coding.by_rows, coding.describe) == (False, "codes, scale per tensor, ConvRot 16")
    got = coding.decode(raw, 0)
    assert not got[0, :16].any()
    assert torch.equal(got[0, 16:], 4.0 * regular_hadamard(16)[5])


def test_nvfp4_by_hand() -> None:
    """All sixteen codes, the low half first; a scale for each sixteen, of the row in the file."""
    raw = torch.tensor([[2 * i + 16 * (2 * i + 1) for i in range(8)] * 2], dtype=torch.uint8)
    scale = torch.tensor([[1.0, 1.0], [2.0, 0.5]]).to(torch.float8_e4m3fn)
    coding = NvFp4(scale, 3.0)
    assert coding.columns(raw.shape[1]) == 32
    assert coding.decode(raw, 1).tolist() == [[6 * x for x in E2M1] + [1.5 * x for x in E2M1]]


def test_e2m1_is_its_bits() -> None:
    """Sign, two bits of exponent with bias 1, one of significand; exponent 0 is subnormal."""
    for code, value in enumerate(E2M1):
        exponent, significand = code >> 1 & 3, code & 1
        magnitude = significand * 0.5 if exponent == 0 else (1 + significand / 2) * 2 ** (exponent - 1)
        assert value == (-magnitude if code & 8 else magnitude)


@pytest.mark.parametrize(("columns", "group"), [(5376, 256), (2688, 64), (192, 64), (24, 4), (8, 4), (6, 0)])
def test_convrot_group_of_the_writer(columns: int, group: int) -> None:
    assert codes.convrot_group(columns) == group
    assert group == 0 or columns % group == 0


@pytest.mark.parametrize("row_block", [1, 3, 4, 100])
def test_scales_of_some_rows(row_block: int) -> None:
    """Those of ``scale[n // row_block]``, from any row on."""
    scale = torch.rand(-(-20 // row_block), 2)
    expected = torch.stack([scale[row // row_block] for row in range(20)])
    coding = Scaled(scale, row_block, 8)
    for first in range(20):
        for count in range(1, 21 - first):
            assert torch.equal(coding.row_scale(first, count), expected[first : first + count])
