"""``vllm-h3-quant check``: what a checkpoint is, what is wrong with it, and what can load it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from vllm_h3_quant.errors import H3QuantError

if TYPE_CHECKING:
    import torch

    from vllm_h3_quant.loader.plan import Plan

_PLAIN_WIDTH = 160


def check(
    path: Annotated[Path, typer.Argument(help="A model's root, a partition, a component's folder, or one file.")],
    against: Annotated[
        Path | None,
        typer.Option(help="The full-precision checkpoint that a pruned one was made from, to compare their AdaLN."),
    ] = None,
    verify: Annotated[bool, typer.Option(help="Compare every tensor's bytes with the manifest of an export.")] = False,
    every: Annotated[int, typer.Option(min=1, help="With --against: compare every n-th timestep of the curve.")] = 1,
) -> None:
    """Tell what a MiniMax-H3 checkpoint is and whether it can be served. Exit code 0 only if it can.

    Reads headers and scales alone, unless --against or --verify asks for more.
    """
    try:
        good = _check(Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH), path, against, verify, every)
    except (H3QuantError, OSError) as error:
        typer.echo(f"vllm-h3-quant check: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(1) from error
    raise typer.Exit(0 if good else 1)


def _check(console: Console, path: Path, against: Path | None, verify: bool, every: int) -> bool:
    from vllm_h3_quant.loader.inspect import find_components, plan_component

    good, compared = True, False
    for label, place in find_components(path).items():
        plan = plan_component(place)
        _describe(console, label, plan)
        good &= not plan.problems
        if plan.problems:
            continue
        if plan.detection.curve:
            good &= _compare(console, plan, against, every)
            compared = True
        if verify:
            _verify(plan)
            console.print("  every tensor has the bytes of the manifest", highlight=False)
    if against is not None and good and not compared:
        raise H3QuantError(f"{path}: is no pruned checkpoint; --against compares the curve of one")
    return good


def _describe(console: Console, label: str, plan: Plan) -> None:
    from vllm_h3_quant.loader.inspect import codings, dtypes, uses

    files = plan.checkpoint.files
    found = plan.detection
    console.print(
        f"[bold]{label}[/]: {found.name}, {len(files)} files, {_gib(plan.checkpoint.nbytes)}", highlight=False
    )
    if plan.architecture is not None:
        console.print(f"  {found.layout.value}", highlight=False)
    told = ", ".join(f"{count} {dtype} ({_gib(nbytes)})" for dtype, (count, nbytes) in dtypes(plan).items())
    console.print(f"  tensors: {told}", highlight=False)
    told = ", ".join(f"{count} {coding}" for coding, count in codings(plan).items())
    console.print(f"  weights of linears: {told or 'none'}", highlight=False)
    for note in plan.notes:
        console.print(f"  [yellow]note[/]: {note}", highlight=False, soft_wrap=True)
    for problem in plan.problems:
        console.print(f"  [red]problem[/]: {problem}", highlight=False, soft_wrap=True)
    if plan.problems:
        console.print("  [red]cannot be loaded[/]", highlight=False)
        return
    table = Table(box=None, padding=(0, 2))
    for column in ("  method", "codes as they are", "quantized at load", "kept as values"):
        table.add_column(column, justify="left" if column == "  method" else "right")
    found_uses = uses(plan)
    for use in found_uses:
        table.add_row(f"  {use.method}", str(use.as_they_are), str(use.quantized), str(sum(use.kept.values())))
    console.print(table)
    for count, reason in dict.fromkeys((count, reason) for use in found_uses for reason, count in use.kept.items()):
        console.print(f"  kept as values: {count} {reason}", highlight=False)


def _compare(console: Console, plan: Plan, against: Path | None, every: int) -> bool:
    from vllm_h3_quant.cli.curve_table import render
    from vllm_h3_quant.loader.curve import compare, refuse_unverified
    from vllm_h3_quant.loader.inspect import find_components, plan_component

    if against is None:
        refuse_unverified(plan, allow=False)
        return False
    places = find_components(against)
    alike = [place for place in places.values() if place.name == plan.checkpoint.place.name]
    chosen = (alike or list(places.values()))[0]
    full = plan_component(chosen)
    full.check()
    report = compare(plan, full, _device(), every=every)
    console.print(render(report))
    return report.good


def _device() -> torch.device:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _verify(plan: Plan) -> None:
    from vllm_h3_quant.loader.manifest import digests_of, root_of
    from vllm_h3_quant.loader.reader import verify

    for entry in plan.checkpoint.entries.values():
        verify(entry, digests_of(root_of(entry.file), entry.file))


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
