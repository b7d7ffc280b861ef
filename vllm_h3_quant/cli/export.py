"""``vllm-h3-quant export``: a model, quantized once and written to be served as it is."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from vllm_h3_quant.config.schema import NAMES
from vllm_h3_quant.errors import H3QuantError

_PLAIN_WIDTH = 160


def export(
    model: Annotated[Path, typer.Argument(help="Root of a MiniMax-H3 model, or FL2VA or Ref2VA in one.")],
    out: Annotated[Path, typer.Argument(help="Folder to write; not there yet, or empty.")],
    method: Annotated[str | None, typer.Option(help=f"For all components: {', '.join(NAMES)}.")] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="A key of the method and its value, as JSON or text: adaln=keep. Repeat.")
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(help='Instead of both: JSON as for serving, also by component: \'{"transformer": "h3_fp8"}\'.'),
    ] = None,
) -> None:
    """Write a quantized copy of a model, served with no flag: codes, scales, and digests of every file.

    Reads one layer at a time, on a GPU if there is one. Until it is complete the copy grows in OUT.partial; after an
    interruption the same command goes on from there.
    """
    try:
        _run(Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH), model, out, method, option or [], config)
    except (H3QuantError, OSError) as error:
        typer.echo(f"vllm-h3-quant export: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(1) from error


def _run(
    console: Console, model: Path, out: Path, method: str | None, option: Sequence[str], config: str | None
) -> None:
    where, spec = _spec(method, option, config)
    from vllm_h3_quant.export.config import parse_request

    request = parse_request(spec, where=where)
    from vllm_h3_quant.export.run import export

    with Bar(console) as bar:
        done = export(model, out, request, watcher=bar)
    for note in done.notes:
        console.print(note, highlight=False, markup=False, soft_wrap=True)
    kept = f", {done.kept} files of it from before" if done.kept else ""
    console.print(f"{out}: {_size(done.nbytes)}{kept}", highlight=False, markup=False, soft_wrap=True)


def _spec(method: str | None, option: Sequence[str], config: str | None) -> tuple[str, str | Mapping[str, Any]]:
    """Where the configuration was given, and what it is."""
    if config is not None:
        if method or option:
            raise H3QuantError("--config already holds the method and its keys; leave --method and --option out")
        try:
            return "--config", json.loads(config)
        except (ValueError, RecursionError) as error:
            raise H3QuantError(f"--config: {config!r} is no JSON: {error}") from None
    if method is None:
        raise H3QuantError(f"--method is missing; give one of {', '.join(NAMES)}, or --config")
    keys: dict[str, Any] = {}
    for text in option:
        key, equals, value = text.partition("=")
        if not equals or key in keys:
            raise H3QuantError(f"--option {text!r} is {'given twice' if equals else 'no key=value'}; adaln=keep is one")
        keys[key] = _value(value)
    return "--method and --option", {"method": method, **keys}


def _value(text: str) -> Any:
    """A list, true, false or null where ``text`` is one in JSON; numbers stay text, which selectors take too."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, list | bool) or value is None else text


class Bar:
    """Bytes, layers and rate of an export: a bar on a terminal, a line for each layer elsewhere."""

    def __init__(self, console: Console) -> None:
        columns = (
            TextColumn("{task.description} {task.fields[layers]}", markup=False),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        self._console = console
        self._live = Progress(*columns, console=console, transient=True) if console.is_terminal else None
        self._task: TaskID | None = None
        self._what, self._total, self._layers = "", 0, 0
        self._started, self._bytes, self._done = 0.0, 0, 0

    def __enter__(self) -> Bar:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live:
            self._live.stop()

    def begin(self, what: str, nbytes: int, layers: int) -> None:
        """Start a bar over ``nbytes``."""
        self._what, self._total, self._layers = what, nbytes, layers
        self._started, self._bytes, self._done = time.monotonic(), 0, 0
        if self._live:
            if self._task is not None:
                self._live.remove_task(self._task)
            self._task = self._live.add_task(what, total=nbytes, layers=self._told_layers())
        else:
            self._print(f"{what} {_size(nbytes)} ...")

    def passed(self, nbytes: int) -> None:
        """Move the bar on."""
        self._bytes += nbytes
        if self._live and self._task is not None:
            self._live.update(self._task, advance=nbytes)

    def finished(self, path: str, layer: bool) -> None:
        """Count a layer."""
        if not layer:
            return
        self._done += 1
        if self._live and self._task is not None:
            self._live.update(self._task, layers=self._told_layers())
        elif self._live is None:
            rate = self._bytes / max(time.monotonic() - self._started, 1e-9)
            done = f"{_size(self._bytes)} of {_size(self._total)}"
            self._print(f"{self._what}: {self._told_layers()}, {done}, {_size(int(rate))}/s")

    def _told_layers(self) -> str:
        return f"{self._done}/{self._layers} layers" if self._layers else ""

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"
