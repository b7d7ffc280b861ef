"""The distance that other tests rely on."""

from __future__ import annotations

import pytest
import torch

from vllm_h3_quant.testing.numeric import relative_l2


def test_by_hand() -> None:
    assert relative_l2(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)


def test_accumulates_beyond_the_precision_of_bf16() -> None:
    reference = torch.ones(100_000, dtype=torch.bfloat16)
    assert relative_l2(reference * 1.5, reference) == pytest.approx(0.5)


def test_not_a_number_never_passes_a_bound() -> None:
    assert not relative_l2(torch.tensor([1.0, float("nan")]), torch.ones(2)) < 1e9


@pytest.mark.parametrize(
    ("values", "reference", "says"),
    [
        (torch.ones(2), torch.ones(3), "cannot be compared"),
        (torch.ones(1), torch.ones(3), "cannot be compared"),
        (torch.ones(0), torch.ones(0), "cannot be compared"),
        (torch.ones(2), torch.zeros(2), "reference of zeros"),
    ],
)
def test_refusals(values: torch.Tensor, reference: torch.Tensor, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        relative_l2(values, reference)
