"""The group-wise Hadamard rotation."""

from __future__ import annotations

import pytest
import torch

from vllm_h3_quant.kernels.hadamard import hadamard_reference, largest_group, undo_hadamard


def matrix(order: int) -> torch.Tensor:
    """Sylvester's construction in fp64, independent of the butterfly."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < order:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return h


def order(group: int) -> list[int]:
    """Which element of ``x H`` each place of the result holds, by the module's definition."""
    apart = group // 16
    return [apart * i + j for j in range(apart) for i in range(16)] if group > 16 else list(range(group))


@pytest.mark.parametrize("group", [2, 16, 32, 256, 512])
def test_is_the_matrix_product(group: int) -> None:
    """fp32 butterfly: log2(g) additions, each within 2^-24 of values up to g times the largest."""
    x = torch.randn(5, 3 * group, generator=torch.Generator().manual_seed(group))
    expected = (x.double().view(5, 3, group) @ matrix(group)[:, order(group)]).view(5, -1)
    bound = group.bit_length() * 2**-24 * group * x.abs().max()
    assert (hadamard_reference(x, group).double() - expected).abs().max() <= bound


def test_products_survive_the_rotation_of_both_operands() -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(4, 512, generator=generator), torch.randn(6, 512, generator=generator)
    rotated = hadamard_reference(x, 256).double() @ hadamard_reference(w, 256).double().t()
    torch.testing.assert_close(rotated / 256, x.double() @ w.double().t(), rtol=0, atol=512 * 2**-20)


def test_one_channel_spreads_over_its_group() -> None:
    x = torch.zeros(1, 512)
    x[0, 300] = 1.0
    y = hadamard_reference(x, 256)
    assert not y[0, :256].any()
    assert torch.equal(y[0, 256:].abs(), torch.ones(256))


@pytest.mark.parametrize(
    ("size", "limit", "group"),
    [
        (5376, 256, 256),
        (14336, 256, 256),
        (2688, 256, 128),
        (896, 256, 128),
        (5120, 512, 512),
        (24, 256, 8),
        (7, 256, 0),
    ],
)
def test_largest_group(size: int, limit: int, group: int) -> None:
    assert largest_group(size, limit) == group
    assert not group or size % group == 0


@pytest.mark.parametrize("group", [0, 1, 3, 32])
def test_refuses_a_group_that_does_not_fit(group: int) -> None:
    with pytest.raises(ValueError, match=f"group {group} "):
        hadamard_reference(torch.ones(1, 48), group)


@pytest.mark.parametrize("group", [2**i for i in range(1, 10)])
def test_undo_is_the_inverse(group: int) -> None:
    """Two butterflies of log2(g) additions of values up to g, then up to g^2, times the largest; divided by g."""
    x = torch.randn(5, 3 * group, generator=torch.Generator().manual_seed(group))
    bound = 2 * group.bit_length() * 2**-24 * group * x.abs().max()
    back = undo_hadamard(hadamard_reference(x, group) * group**-0.5, group)
    assert back.shape == x.shape
    assert (back - x).abs().max() <= bound


def test_undo_refuses_a_group_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match="group 32 "):
        undo_hadamard(torch.ones(1, 48), 32)
