"""Loads of a whole MiniMax-H3 by the engine's loader: seconds, and peaks of device and host memory.

Each load is a process of its own. Beside them stands a plain read of the same files. ``ms`` begins with the first
tensor that the engine asks for and ends when the pipeline is loaded; ``load s`` also has the model's construction.
``over final`` is how much more the device held at its peak than at the end. Peaks of the host are over what the
process had before: ``anon`` is its own memory, ``file`` mapped pages of the checkpoint, which the system can drop,
``pinned`` page-locked memory of PyTorch, which the kernel counts among neither. All are GiB.

    python benchmarks/bench_load.py --model /tmp/h3 --layers 24 --variants bf16,fp8,h3_fp8,h3_int8 --out out
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from figures import GIB, difference, gib, median, spread, unmeasured
from harness.report import Environment, Row, environment, print_table, write_csv
from model_folder import architecture, transformer
from processes import NotMeasured, run
from synthetic_h3 import H3, TINY, write_synthetic_h3
from weight_files import cached, drop_pages, total_bytes, weight_files

from vllm_h3_quant.config.names import REPLACE_VARIABLE, replaced
from vllm_h3_quant.config.schema import NAMES as OURS
from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.loader.checkpoint import open_checkpoint
from vllm_h3_quant.loader.formats import detect

HERE = Path(__file__).parent
STOCK = ("fp8", "int8")
EXPORT = "export"
LOADED = ("bf16", *STOCK, *OURS, EXPORT)
VARIANTS = "bf16,fp8,h3_fp8,h3_int8"
OFFLOADS = {"cpu": "enable_cpu_offload", "layerwise": "enable_layerwise_offload"}


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
        Any,
        typer.Option(
            parser=check_variants,
            metavar="V,..",
            help="Loads; V@layerwise or V@cpu with that offload.",
            show_default=f"{VARIANTS}, and {EXPORT} with --export",
        ),
    ] = None,
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
        loads = check_variants(f"{VARIANTS},{EXPORT}" if export else VARIANTS) if variants is None else variants
        exported = [load for load in loads if load.name == EXPORT]
        if exported and export is None:
            raise H3QuantError(f"--variants: {exported[0]} is a load of an exported model; give its root with --export")
        if layers is not None:
            write_synthetic_h3(model, layers=layers, architecture=TINY if tiny else H3)
        for root in (model, export):
            if root is not None:
                sizes(root)
        if export is not None:
            check_export(export)
    except (H3QuantError, ValueError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    out.mkdir(parents=True, exist_ok=True)
    bench = _Bench(out, repeats=repeats, cold=cold, limit=limit)
    bench.measure(model, "plain read", [load for load in loads if load.name != EXPORT])
    if export is not None:
        bench.measure(export, "plain read of export", exported)
    print_table(bench.rows)
    if any(row.unavailable for row in bench.rows):
        raise typer.Exit(1)


def sizes(model: Path) -> dict[str, int]:
    """What tells a model's rows from those of another.

    Raises:
        H3QuantError: there is no model.
    """
    found = architecture(model)
    if not weight_files(model):
        raise H3QuantError(f"{model} holds no weights; give another, or --layers N and a folder that is free")
    return {"layers": found.num_layers, "hidden": found.hidden_size}


def check_export(model: Path) -> None:
    """Refuse what would be loaded without codes under the name of an export.

    Raises:
        H3QuantError: this package did not export the model.
    """
    found = detect(open_checkpoint(transformer(model)))
    if not found.format.is_export:
        raise H3QuantError(
            f"--export {model} is {found.name}; write one with vllm-h3-quant export {model} OUT --method h3_fp8"
        )


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
        self._add(title, found["seconds"], nbytes, {"cached": median(found["cached"])}, found["environment"])
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
            "load s": median([one["load_s"] for one in found]),
            "device": gib([one["device"]["final"] for one in found]),
            "device peak": gib([one["device"]["peak"] for one in found]),
            "over final": gib([difference(one["device"]["peak"], one["device"]["final"]) for one in found]),
            "reserved": gib([one["device"]["reserved"] for one in found]),
            "host peak": gib([one["host"]["host"] for one in found]),
            "anon": gib([one["host"]["anonymous"] for one in found]),
            "file": gib([one["host"]["file"] for one in found]),
            "shmem": gib([one["host"]["shared"] for one in found]),
            "pinned": gib([one["device"]["pinned"] for one in found]),
            "cached": median(parts),
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
        middle = statistics.median(seconds) if seconds else None
        row = Row(
            benchmark="load",
            case=self._case,
            variant=variant,
            **spread(seconds),
            repetitions=len(seconds),
            gb_s=nbytes / middle / 1e9 if middle else None,
            tflop_s=None,
            extra={"GiB": nbytes / GIB, "GiB/s": nbytes / middle / GIB if middle else None, **extra},
            unavailable=unavailable,
            # This process asks no GPU, which would take memory of it.
            environment=Environment(**where) if where else unmeasured(self.rows, environment(torch.device("cpu"))),
        )
        self.rows.append(row)
        write_csv(self._out / "load.csv", [row])

    def _run(self, script: str, request: Mapping[str, Any], name: str) -> Any:
        """The result of a script in a process of its own.

        Raises:
            NotMeasured: it failed, or took longer than the limit.
        """
        return run(HERE / script, [request], name, log=self._out / "load.log", limit=self._limit)[0]


if __name__ == "__main__":
    typer.run(main)
