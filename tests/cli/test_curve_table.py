"""The comparison of a curve as a table: what a reader must see."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from vllm_h3_quant.cli.curve_table import render
from vllm_h3_quant.loader.curve import CurveReport, LayerCurve

GOOD = LayerCurve(
    name="blocks.0.adaln_proj.linear",
    cosine_min=0.99966,
    cosine_median=0.99968,
    ratio_min=0.9995,
    ratio_median=1.0002,
    ratio_max=1.0008,
    change_error=0.0261,
    bias_difference=0,
    worst=0,
)
BAD = replace(
    GOOD,
    name="final_layer.adaln_proj.linear",
    cosine_min=-0.07123,
    ratio_max=57.31,
    change_error=math.inf,
    bias_difference=0.25,
    worst=512,
)


def shown(*layers: LayerCurve) -> str:
    output = io.StringIO()
    report = CurveReport(Path("/pruned"), Path("/full"), grid=1025, width=8, compared=129, layers=layers)
    Console(file=output, width=200).print(render(report))
    return output.getvalue()


def test_each_projection_has_its_numbers_and_its_word() -> None:
    lines = shown(GOOD, BAD).splitlines()
    cells = [
        [cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "blocks." in line or "final_" in line
    ]
    assert cells[0] == ["blocks.0", "0.99966", "0.99968", "0.9995", "1", "1.001", "2.61%", "0", "good"]
    assert cells[1] == ["final_layer", "-0.07123", "0.99968", "0.9995", "1", "57.31", "inf%", "0.25", "BAD"]


def test_limits_places_and_count_stand_above() -> None:
    text = shown(GOOD)
    for part in ("/pruned against /full: 129 of 1025 timesteps", ">= 0.999", ">= 0.98", "<= 1.02", "<= 5%"):
        assert part in text


@pytest.mark.parametrize(
    ("layers", "verdict"), [((GOOD,), "matches in all 1"), ((GOOD, BAD), "does NOT match: 1 of 2")]
)
def test_the_verdict_stands_below(layers: tuple[LayerCurve, ...], verdict: str) -> None:
    lines = shown(*layers).splitlines()
    at = next(index for index, line in enumerate(lines) if verdict in line)
    assert at > max(index for index, line in enumerate(lines) if "blocks.0" in line)


def test_a_cosine_just_below_the_limit_is_not_rounded_up_to_it() -> None:
    assert "0.99899" in shown(replace(GOOD, cosine_min=0.99899))
