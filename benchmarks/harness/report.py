"""What a benchmark leaves: rows with the machine and versions in each, as CSV and as a table."""

from __future__ import annotations

import csv
import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from importlib import metadata
from itertools import groupby
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from vllm_h3_quant import __version__


@dataclass(frozen=True)
class Environment:
    """Where a row was measured; None for what is not installed."""

    gpu: str
    driver: str | None
    torch: str
    triton: str | None
    cuda: str | None
    vllm: str | None
    vllm_omni: str | None
    vllm_h3_quant: str


@dataclass(frozen=True)
class Row:
    """One variant in one case. Times are milliseconds a call, rates come from the median.

    Attributes:
        ms: median; None where the variant is unavailable. ``ms_p20`` and ``ms_p80`` enclose the middle
            60% of the repetitions.
        gb_s: 10^9 bytes a second.
        tflop_s: 10^12 operations a second.
    """

    benchmark: str
    case: Mapping[str, object]
    variant: str
    ms: float | None
    ms_p20: float | None
    ms_p80: float | None
    repetitions: int
    gb_s: float | None
    tflop_s: float | None
    extra: Mapping[str, object]
    unavailable: str | None
    environment: Environment

    def record(self) -> dict[str, object]:
        """The row by :data:`COLUMNS`; ``case`` and ``extra`` are JSON objects."""
        cells: dict[str, object] = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "environment"}
        cells |= {"case": json.dumps(dict(self.case)), "extra": json.dumps(dict(self.extra))}
        return cells | asdict(self.environment)


def untimed(
    benchmark: str, case: Mapping[str, object], variant: str, extra: Mapping[str, object], where: Environment
) -> Row:
    """A row that has figures and no times."""
    return Row(
        benchmark=benchmark,
        case=case,
        variant=variant,
        ms=None,
        ms_p20=None,
        ms_p80=None,
        repetitions=0,
        gb_s=None,
        tflop_s=None,
        extra=extra,
        unavailable=None,
        environment=where,
    )


COLUMNS: tuple[str, ...] = (
    *(f.name for f in fields(Row) if f.name != "environment"),
    *(f.name for f in fields(Environment)),
)
"""The columns of a CSV file, the same for every benchmark."""


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Append ``rows`` to ``path``, with a header when the file is new.

    Raises:
        ValueError: the file has other columns.
    """
    new = not path.exists() or not path.stat().st_size
    if not new:
        with path.open(newline="") as file:
            header = tuple(next(csv.reader(file)))
        if header != COLUMNS:
            raise ValueError(f"{path} has the columns {', '.join(header)}; give a new file")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if new:
            writer.writeheader()
        writer.writerows(row.record() for row in rows)


def print_table(rows: Sequence[Row], console: Console | None = None) -> None:
    """Print one table a benchmark, a section a case, and below them where they were measured.

    What all cases share stands in the title, what differs in columns.
    """
    console = console or Console()
    if not console.is_terminal:
        console.width = max(console.width, 200)  # a pipe counts as 80 columns, which cuts cells
    for _, group in groupby(rows, key=lambda row: row.benchmark):
        console.print(_table(list(group)))
    for where in dict.fromkeys(row.environment for row in rows):
        console.print(phrase(asdict(where)), highlight=False, soft_wrap=True)


def report(rows: Sequence[Row], csv_path: Path | None) -> None:
    """Print the rows and, with a path, append them to that file."""
    print_table(rows)
    if csv_path is not None:
        write_csv(csv_path, rows)


def environment(device: torch.device) -> Environment:
    """The device and the versions that a row carries."""
    on_gpu = device.type == "cuda"
    return Environment(
        gpu=torch.cuda.get_device_name(device) if on_gpu else "cpu",
        driver=_driver() if on_gpu else None,
        torch=str(torch.__version__),
        triton=_version("triton"),
        cuda=torch.version.cuda,
        vllm=_version("vllm"),
        vllm_omni=_version("vllm-omni"),
        vllm_h3_quant=__version__,
    )


@cache
def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return found[0] if found else None


@cache
def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


_MEASURED = {"ms": "ms", "ms_p20": "p20", "ms_p80": "p80", "gb_s": "GB/s", "tflop_s": "TFLOP/s"}


def _table(rows: Sequence[Row]) -> Table:
    case_fields = dict.fromkeys(key for row in rows for key in row.case)
    varying = [key for key in case_fields if any(row.case.get(key) != rows[0].case.get(key) for row in rows)]
    shared = {key: rows[0].case[key] for key in case_fields if key not in varying}
    measured = [name for name in _MEASURED if any(getattr(row, name) is not None for row in rows)]
    extras = list(dict.fromkeys(key for row in rows for key in row.extra))
    table = Table(title=", ".join(filter(None, (rows[0].benchmark, phrase(shared)))), title_justify="left")
    for name in (*varying, "variant"):
        table.add_column(name.replace("_", " "), no_wrap=True)
    for name in (*(_MEASURED[name] for name in measured), *(key.replace("_", " ") for key in extras)):
        table.add_column(name, justify="right", overflow="fold")
    reasons = any(row.unavailable for row in rows)
    if reasons:
        table.add_column("unavailable")
    for case, group in groupby(rows, key=lambda row: dict(row.case)):
        for row in group:
            cells = [*(getattr(row, name) for name in measured), *(row.extra.get(key) for key in extras)]
            where = [*(case.get(key) for key in varying), row.variant]
            table.add_row(*map(_text, where), *map(_text, cells), *([row.unavailable or ""] if reasons else []))
        table.add_section()
    return table


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return "" if value is None else str(value)


def phrase(cells: Mapping[str, object]) -> str:
    """``name value`` of each cell that is there."""
    return ", ".join(f"{key} {value}" for key, value in cells.items() if value is not None)
