"""From what processes measured to the cells of a row; None where nothing was."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from harness.report import Environment, Row

GIB = 2**30


def median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def gib(values: Sequence[int | None]) -> float | None:
    """Median in GiB."""
    return scaled(median(values), 1 / GIB)


def scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def difference(more: int | None, less: int | None) -> int | None:
    return None if more is None or less is None else more - less


def spread(seconds: Sequence[float]) -> dict[str, float | None]:
    """``ms``, ``ms_p20`` and ``ms_p80`` of a row."""
    names = {"ms_p20": 20, "ms": 50, "ms_p80": 80}
    return {name: float(np.percentile(seconds, part)) * 1e3 if seconds else None for name, part in names.items()}


def unmeasured(rows: Sequence[Row], here: Environment) -> Environment:
    """Of a row without a measurement: as of the row before, else ``here``, of whose GPU nothing was asked."""
    return rows[-1].environment if rows else replace(here, gpu="unknown")
