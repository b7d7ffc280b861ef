"""Loads of a whole MiniMax-H3 by the engine's loader: seconds, and peaks of device and host memory.

Each load is a process of its own. Beside them stands a plain read of the same files. ``ms`` begins with the first
tensor that the engine asks for and ends when the pipeline is loaded; ``load s`` also has the model's construction.
``over final`` is how much more the device held at its peak than at the end. Peaks of the host are over what the
process had before: ``anon`` is its own memory, ``file`` mapped pages of the checkpoint, which the system can drop,
``pinned`` page-locked memory of PyTorch, which the kernel counts among neither. All are GiB.

    python benchmarks/bench_load.py --model /tmp/h3 --layers 24 --variants bf16,fp8,h3_fp8,h3_int8 --out out
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from weight_files import cached, drop_pages, total_bytes, weight_files

from vllm_h3_quant.config import NAMES as OURS
from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.loader.architecture import Architecture
from vllm_h3_quant.loader.checkpoint import open_checkpoint, read_json
from vllm_h3_quant.loader.formats import Kind, detect
from vllm_h3_quant.names import REPLACE_VARIABLE, replaced
from vllm_h3_quant.testing.bench_report import Environment, Row, environment, print_table, write_csv
from vllm_h3_quant.testing.synthetic_h3 import H3, TINY, write_synthetic_h3

HERE = Path(__file__).parent
STOCK = ("fp8", "int8")
EXPORT = "export"
LOADED = ("bf16", *STOCK, *OURS, EXPORT)
OFFLOADS = {"cpu": "enable_cpu_offload", "layerwise": "enable_layerwise_offload"}
GIB = 2**30


@dataclass(frozen=True)
class Load:
    """One way to load: what is loaded, and which offload is asked for.

    Attributes:
        name: one of :data:`LOADED`.
        offload: a key of :data:`OFFLOADS`, or None.
    """

    name: str
    offload: str | None = None

    def __str__(self) -> str:
        return f"{self.name}@{self.offload}" if self.offload else self.name

    def request(self, model: Path) -> dict[str, Any]:
        """What ``load_once.py`` takes; an export says by itself how it is quantized."""
        quantization = None if self.name in ("bf16", EXPORT) else self.name
        fields = {OFFLOADS[self.offload]: True} if self.offload else {}
        return {"model": str(model), "quantization": quantization, "fields": fields}


class NotMeasured(RuntimeError):
    """A process did not give a result; the message is what the row says."""


def check_variants(text: str) -> tuple[Load, ...]:
    """The loads in a list such as ``"bf16,h3_fp8@layerwise"``.

    Raises:
        ValueError: a name or an offload that is none, twice the same, or a method of the engine that the environment
            serves with this package.
    """
    loads = []
    for part in text.split(","):
        name, at, offload = part.partition("@")
        if name not in LOADED:
            raise ValueError(f"unknown variant {name!r}, choose from {', '.join(LOADED)}")
        if at and offload not in OFFLOADS:
            raise ValueError(f"unknown offload {offload!r} in {part!r}, choose from {', '.join(OFFLOADS)}")
        if name in replaced():
            raise ValueError(f"{REPLACE_VARIABLE} serves {name!r} with this package: unset it to measure the engine's")
        loads.append(Load(name, offload or None))
    if len(set(loads)) < len(loads):
        raise ValueError(f"a variant is given twice in {text!r}")
    return tuple(loads)


def main(
    model: Annotated[Path, typer.Option(help="Model root.")],
    out: Annotated[Path, typer.Option(help="Folder of load.csv and load.log, which are appended to.")],
    variants: Annotated[
        Any, typer.Option(parser=check_variants, metavar="V,..", help="Loads; V@layerwise or V@cpu with that offload.")
    ] = "bf16,fp8,h3_fp8,h3_int8,export",
    export: Annotated[Path | None, typer.Option(help="Root of an exported model, for the variant export.")] = None,
    layers: Annotated[
        int | None,
        typer.Option(min=1, help="Write a synthetic model of so many blocks at --model, unless it is there."),
    ] = None,
    tiny: Annotated[bool, typer.Option(help="The synthetic model's blocks are small, for a CPU.")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Loads of each variant; medians are reported.")] = 1,
    cold: Annotated[bool, typer.Option(help="Drop the files from the page cache before each load and read.")] = False,
    limit: Annotated[float, typer.Option(min=1, help="Seconds that one process may take.")] = 280,
) -> None:
    """Time loads of a MiniMax-H3, and measure what memory they take."""
    try:
        if layers is not None:
            write_synthetic_h3(model, layers=layers, architecture=TINY if tiny else H3)
        for root in (model, export):
            if root is not None:
                sizes(root)
        if export is not None:
            check_export(export)
    except H3QuantError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    out.mkdir(parents=True, exist_ok=True)
    bench = _Bench(out, repeats=repeats, cold=cold, limit=limit)
    bench.measure(model, "plain read", [load for load in variants if load.name != EXPORT])
    exported = [load for load in variants if load.name == EXPORT]
    if export is not None:
        bench.measure(export, "plain read of export", exported)
    else:
        for load in exported:
            typer.echo(f"{load}: skipped, no --export was given")
    print_table(bench.rows)
    if any(row.unavailable for row in bench.rows):
        raise typer.Exit(1)


def sizes(model: Path) -> dict[str, int]:
    """What tells a model's rows from those of another.

    Raises:
        H3QuantError: there is no model.
    """
    config = transformer(model) / "config.json"
    found = Architecture.from_config(read_json(config), where=str(config))
    return {"layers": found.num_layers, "hidden": found.hidden_size}


def check_export(model: Path) -> None:
    """Refuse what would be loaded without codes under the name of an export.

    Raises:
        H3QuantError: this package did not export the model.
    """
    found = detect(open_checkpoint(transformer(model)))
    if found.kind is not Kind.EXPORT:
        raise H3QuantError(
            f"--export {model} is {found.name}; write one with vllm-h3-quant export {model} OUT --method h3_fp8"
        )


def transformer(model: Path) -> Path:
    """The folder of a model's transformer.

    Raises:
        H3QuantError: there is no model.
    """
    for folder in (model / "FL2VA" / "transformer", model / "transformer"):
        if (folder / "config.json").is_file() and weight_files(model):
            return folder
    raise H3QuantError(f"{model} is no model root; give one, or --layers N to write a synthetic one at --model")


class _Bench:
    """Measures and keeps the rows; each is in the file as soon as it is known."""

    def __init__(self, out: Path, *, repeats: int, cold: bool, limit: float) -> None:
        self.rows: list[Row] = []
        self._case: Mapping[str, object] = {}
        self._out = out
        self._repeats = repeats
        self._cold = cold
        self._limit = limit

    def measure(self, model: Path, title: str, loads: Sequence[Load]) -> None:
        """The plain read of a model's files, then each load of it; nothing where there is no load."""
        if not loads:
            return
        self._case = {**sizes(model), "files": "cold" if self._cold else "warm"}
        files = weight_files(model)
        nbytes = total_bytes(files)
        plain = self._plain_read(title, files, nbytes)
        for load in loads:
            self._load(load, model, files, nbytes, plain)

    def _plain_read(self, title: str, files: Sequence[Path], nbytes: int) -> float | None:
        request = {"files": [str(file) for file in files], "repeats": self._repeats, "cold": self._cold}
        try:
            found = self._run("weight_files.py", request, title)
        except NotMeasured as error:
            self._add(title, [], nbytes, {}, unavailable=str(error))
            return None
        self._add(title, found["seconds"], nbytes, {"cached": _median(found["cached"])}, found["environment"])
        return statistics.median(found["seconds"])

    def _load(self, load: Load, model: Path, files: Sequence[Path], nbytes: int, plain: float | None) -> None:
        found, parts = [], []
        try:
            for repeat in range(self._repeats):
                if self._cold:
                    drop_pages(files)
                parts.append(cached(files))
                found.append(self._run("load_once.py", load.request(model), f"{load}, {repeat + 1} of {self._repeats}"))
        except NotMeasured as error:
            self._add(str(load), [], nbytes, {}, unavailable=str(error))
            return
        seconds = [one["weights_s"] for one in found]
        extra = {
            "of plain read": None if plain is None else plain / statistics.median(seconds),
            "load s": _median([one["load_s"] for one in found]),
            "device": _gib([one["device"]["final"] for one in found]),
            "device peak": _gib([one["device"]["peak"] for one in found]),
            "over final": _gib([_difference(one["device"]["peak"], one["device"]["final"]) for one in found]),
            "reserved": _gib([one["device"]["reserved"] for one in found]),
            "host peak": _gib([one["host"]["host"] for one in found]),
            "anon": _gib([one["host"]["anonymous"] for one in found]),
            "file": _gib([one["host"]["file"] for one in found]),
            "shmem": _gib([one["host"]["shared"] for one in found]),
            "pinned": _gib([one["device"]["pinned"] for one in found]),
            "cached": _median(parts),
        }
        self._add(str(load), seconds, nbytes, extra, found[0]["environment"])

    def _add(
        self,
        variant: str,
        seconds: Sequence[float],
        nbytes: int,
        extra: Mapping[str, object],
        where: Mapping[str, Any] | None = None,
        unavailable: str | None = None,
    ) -> None:
        low, median, high = (float(t) for t in np.percentile(seconds, (20, 50, 80))) if seconds else (None, None, None)
        row = Row(
            benchmark="load",
            case=self._case,
            variant=variant,
            ms=_scaled(median, 1e3),
            ms_p20=_scaled(low, 1e3),
            ms_p80=_scaled(high, 1e3),
            repetitions=len(seconds),
            gb_s=nbytes / median / 1e9 if median else None,
            tflop_s=None,
            extra={"GiB": nbytes / GIB, "GiB/s": nbytes / median / GIB if median else None, **extra},
            unavailable=unavailable,
            environment=Environment(**where) if where else self._environment(),
        )
        self.rows.append(row)
        write_csv(self._out / "load.csv", [row])

    def _environment(self) -> Environment:
        """Of a row without a measurement; this process asks no GPU, which would take memory of it."""
        return self.rows[-1].environment if self.rows else replace(environment(torch.device("cpu")), gpu="unknown")

    def _run(self, script: str, request: Mapping[str, Any], name: str) -> Any:
        """The result of a script in a process of its own.

        Raises:
            NotMeasured: it failed, or took longer than the limit.
        """
        log = self._out / "load.log"
        with tempfile.TemporaryDirectory() as scratch, log.open("ab") as stream:
            asked, result = Path(scratch) / "request.json", Path(scratch) / "result.json"
            asked.write_text(json.dumps(request))
            stream.write(f"== {name}\n".encode())
            stream.flush()
            begin = stream.tell()
            command = [sys.executable, str(HERE / script), str(asked), str(result)]
            process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT)
            try:
                code = process.wait(self._limit)
            except subprocess.TimeoutExpired:
                raise NotMeasured(f"took more than {self._limit:g} s, see {log}") from None
            finally:
                process.kill()  # nothing happens to one that has ended
                process.wait()  # until its memory is free again
            if code == 0 and result.is_file():
                return json.loads(result.read_text())
        said = log.read_bytes()[begin:].decode(errors="replace").strip().splitlines()
        raise NotMeasured(f"exit code {code}, see {log}: {said[-1][:200] if said else 'it said nothing'}")


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _gib(values: Sequence[int | None]) -> float | None:
    return _scaled(_median(values), 1 / GIB)


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _difference(more: int | None, less: int | None) -> int | None:
    return None if more is None or less is None else more - less


if __name__ == "__main__":
    typer.run(main)
