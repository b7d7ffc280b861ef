"""Selectors of layers and steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_h3_quant.config.selector import LARGEST, canonical, indices


@pytest.mark.parametrize(
    ("value", "spelt"),
    [
        (None, ""),
        ("", ""),
        (" , ", ""),
        ([], ""),
        ("7", "7"),
        ("0-3,46-49", "0-3,46-49"),
        (" 5 , 0 - 3, 4", "0-5"),
        ("2,2,1-3", "1-3"),
        ([9, 1, 2], "1-2,9"),
        ({4}, "4"),
        ("3-3", "3"),
    ],
)
def test_one_spelling(value: object, spelt: str) -> None:
    assert canonical(value) == spelt


@given(st.frozensets(st.integers(0, LARGEST), max_size=40))
def test_round_trip(selected: frozenset[int]) -> None:
    spelt = canonical(sorted(selected, reverse=True))
    assert indices(spelt) == selected
    assert canonical(spelt) == spelt


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("0-3,x", "'x' is no index or range, write for example '0-3,46-49'"),
        ("3-1", "the range '3-1' does not ascend, write '1-3'"),
        ("-1", "'-1' is no index or range"),
        ("1-2-3", "'1-2-3' is no index or range"),
        ("0-99999", "99999 is no index from 0 to 9999"),
        ([1, "2"], "'2' is no index"),
        ([True], "True is no index"),
        ([-4], "-4 is no index"),
        ([1.5], "1.5 is no index"),
        (3, "expected indices and ranges such as '0-3,46-49'"),
        ({"a": 1}, "or a list of indices"),
    ],
)
def test_refusals_name_the_token_and_an_example(value: object, says: str) -> None:
    with pytest.raises(ValueError) as caught:
        canonical(value)
    assert says in str(caught.value)
    assert "0-3,46-49" in str(caught.value)
    assert "\n" not in str(caught.value)
