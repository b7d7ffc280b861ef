"""``vllm-h3-quant demo``: a tiny H3 served in bf16 and quantized, and a table of what came out."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from vllm_h3_quant.cli.client import ClipRequest, RequestError
from vllm_h3_quant.cli.demo_run import (
    REFERENCE,
    Fidelity,
    MethodRun,
    check_size,
    compare,
    parse_methods,
    run_methods,
    write_summary,
)
from vllm_h3_quant.cli.progress import Steps
from vllm_h3_quant.cli.server import ServerError, exit_on_terminate
from vllm_h3_quant.config.schema import METHODS
from vllm_h3_quant.errors import H3QuantError

_PROMPT = "A street musician plays the accordion while pigeons land around her."
_PLAIN_WIDTH = 180


def demo(
    out: Annotated[Path, typer.Option(help="Folder of the clips, logs, contact sheet and summary.")] = Path("out/demo"),
    methods: Annotated[str, typer.Option(help="Comma-separated; bf16 is the reference of the comparison.")] = ",".join(
        (REFERENCE, *METHODS)
    ),
    steps: Annotated[int, typer.Option(min=1, max=200, help="Denoising steps.")] = 4,
    size: Annotated[int, typer.Option(help="Width and height in pixels, a multiple of 32.")] = 64,
    keep_model: Annotated[
        Path | None, typer.Option(help="Folder of the tiny checkpoint, reused if it is there. Default: OUT/model.")
    ] = None,
) -> None:
    """Write a tiny random-weight MiniMax-H3, serve it with each method, and compare the clips.

    The engine, the HTTP request and the quantized layers are the real ones; only the weights are random. Uses
    the GPU where there is one.
    """
    try:
        with exit_on_terminate():
            _run(_console(), out, methods, steps, size, keep_model or out / "model")
    except (H3QuantError, OSError, RequestError, ServerError, ValueError) as error:
        typer.echo(f"vllm-h3-quant demo: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(1) from error


def _console() -> Console:
    terminal = sys.stdout.isatty()
    return Console(width=None if terminal else _PLAIN_WIDTH)


def _run(console: Console, out: Path, methods: str, denoising_steps: int, size: int, model: Path) -> None:
    chosen = parse_methods(methods)
    check_size(size)
    out.mkdir(parents=True, exist_ok=True)
    request = ClipRequest(prompt=_PROMPT, width=size, height=size, num_inference_steps=denoising_steps)
    with Steps(console) as steps:
        with steps.step(f"tiny checkpoint in {model}"):
            from vllm_h3_quant.tiny_h3 import write_tiny_h3

            write_tiny_h3(model)
        runs = run_methods(chosen, model, request, out, steps)
        with steps.step(f"compare with {REFERENCE}"):
            fidelity = compare(runs, out / "grid.png")
    write_summary(out / "summary.json", request, runs, fidelity)
    console.print(_table(runs, fidelity))
    console.print(f"Contact sheet: {out / 'grid.png'}; figures: {out / 'summary.json'}", highlight=False)


def _table(runs: Sequence[MethodRun], fidelity: dict[str, Fidelity]) -> Table:
    from vllm_h3_quant.fidelity.metrics import describe_db

    table = Table()
    table.add_column("method")
    table.add_column("linears quantized")
    for heading in ("weights MiB", "start s", "request s", f"PSNR vs {REFERENCE}", f"audio SNR vs {REFERENCE}"):
        table.add_column(heading, justify="right")
    table.add_column("file", overflow="fold")
    for run in runs:
        linears = ", ".join(f"{name} {done}/{of}" for name, (done, of) in run.linears.items())
        distances = fidelity[run.method]
        table.add_row(
            run.method,
            linears,
            f"{run.weight_bytes / 2**20:.1f}",
            f"{run.start_seconds:.1f}",
            f"{run.request_seconds:.1f}",
            describe_db(distances.psnr_db),
            describe_db(distances.audio_snr_db),
            str(run.file),
        )
    return table
