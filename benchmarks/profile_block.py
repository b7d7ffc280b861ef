"""Where the GPU time of a MiniMax-H3 DiT block goes, by kind of kernel, for several methods.

The block and its inputs are those of ``bench_block.py``. A repetition runs every method once, in an order drawn anew,
and each call has a profiler of its own with the device idle before and after, so that a kernel can belong to no other
method. The time of a kernel is the sum of its launches in one call, the median over the repetitions; a kind is the sum
of its kernels. A fused kernel counts once, in the kind that its name stands for. Gaps between kernels are left out, and
kernels that overlap count in full. The device rests between calls, so that under a power limit the sum can be less than
the block's time in ``bench_block.py``.

On a CPU the operators of PyTorch stand for kernels.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from bench_block import block_inputs
from h3_layers import block, check_methods, engine, refusal
from harness.measure import turns
from harness.report import Row, environment, print_table, write_csv
from rich.markup import escape
from shapes import H3, TINY, BlockShape, parse_tokens
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

KINDS: tuple[tuple[str, str, str], ...] = (
    # FlashAttention consists of CUTLASS kernels too.
    ("attention kernel", r"flash(?!infer)|fmha|\b_int8_attention_kernel", "#6baed6"),
    ("GEMM", r"gemm|gemv|cutlass|nvjet|wgmma|cublas|xmma", "#fdae6b"),
    (
        "AdaLN, norm, gate",
        r"\b_(rms_norm_indexed_scale_shift|indexed_gate|indexed_scale_shift)|\b_modulate_kernel",
        "#74c476",
    ),
    # Where both are one kernel it counts here: it sums for attention's means as well.
    ("q/k norm, RoPE", r"\b_(rms|qk)_norm_rope_kernel|\b_turn_kernel", "#c7e9c0"),
    ("attention preparation", r"\b_(part|document|codes|locate)_kernel", "#9e9ac8"),
    ("attention output", r"\b_(add_mean|mean_codes)_kernel", "#dadaeb"),
    ("SwiGLU", r"(act|silu)_and_mul|\b_swiglu_kernel", "#fa9fb5"),
    # The engine's fp8 has its activations quantized by a compiled kernel, which is named after its steps.
    ("quantize", r"(?<!h3_)quant|per_token|segmented_max_reduction|triton_red_fused_\w*abs\w*max", "#ffd92f"),
)
"""Each kind, what the names of its kernels contain in either case, and its colour; the first that matches counts."""

OTHER = "other"
COLOURS = {**{kind: colour for kind, _, colour in KINDS}, OTHER: "#bdbdbd"}
"""Every kind in the order in which it is shown."""

TOTAL = "all kernels"
DEFAULT_METHODS = "bf16,fp8,h3_fp8_full:unfused,h3_fp8_full"
BY_KIND = "profile by kind"
BY_KERNEL = "profile by kernel"
SHOWN = 12
NAME_WIDTH = 100

Bars = dict[str, dict[str, float]]
"""Milliseconds by method and kind."""


def main(
    tokens: Annotated[Any, typer.Option(parser=parse_tokens, metavar="N,4s,..", help="Tokens, or seconds.")] = "4s",
    methods: Annotated[Any, typer.Option(parser=check_methods, metavar="M,..", help="Methods.")] = DEFAULT_METHODS,
    tiny: Annotated[bool, typer.Option(help="A small block, for a CPU.")] = False,
    repeat: Annotated[int, typer.Option(min=1, help="Profiled calls of each method.")] = 10,
    csv: Annotated[Path | None, typer.Option(help="Append the rows to this file.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw the kinds; -TOKENS is added for several counts.")] = None,
    from_csv: Annotated[Path | None, typer.Option(help="Draw the rows of this file and measure nothing.")] = None,
) -> None:
    """Profile a MiniMax-H3 DiT block: GPU time by kind of kernel and by kernel."""
    if from_csv is not None:
        if png is None:
            raise typer.BadParameter("--from-csv needs --png, the picture to draw")
        try:
            draw(png, *bars(read_records(from_csv)))
        except (OSError, ValueError) as error:
            raise typer.BadParameter(f"{from_csv}: {error}") from None
        return
    shape = TINY if tiny else H3
    rows: list[Row] = []
    with engine() as device:
        refused = {method: refusal(method, device) for method in methods}
        blocks = {method: block(shape, method, device) for method in methods if refused[method] is None}
        for count in tokens:
            with torch.inference_mode():
                times = profile_blocks(shape, blocks, count, device, repeat)
            found = rows_of(times, refused, count, device)
            print_table(for_console(found))
            if csv is not None:
                write_csv(csv, found)
            rows += found
    if png is not None and blocks:
        draw(png, *bars(row.record() for row in rows))


def profile_blocks(
    shape: BlockShape, blocks: Mapping[str, Any], tokens: int, device: torch.device, repeat: int
) -> dict[str, list[dict[str, float]]]:
    """Milliseconds by kernel of each profiled call, by method, the methods interleaved.

    Raises:
        RuntimeError: the profiler recorded nothing.
    """
    x, arguments = block_inputs(shape, tokens, device)
    for model in blocks.values():
        for _ in range(2):
            model(x, **arguments)
    names = list(blocks)
    calls: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    for turn in turns(len(names), repeat):
        for name in (names[index] for index in turn):
            _wait(device)
            with profile(activities=[activity]) as profiler:
                blocks[name](x, **arguments)
                _wait(device)
            call = kernel_ms(profiler.events() or (), device)
            if not call:
                raise RuntimeError(f"the profiler recorded no kernel of {name!r}: detach other profilers (CUPTI)")
            calls[name].append(call)
    return calls


def kernel_ms(events: Iterable[Any], device: torch.device) -> dict[str, float]:
    """Milliseconds by name of what ran on ``device``; ranges that only name a stretch of time are left out.

    Args:
        events: a profiler's ``FunctionEvent`` records, in microseconds. On a CPU the time of an operator is
            without that of the operators it calls.
    """
    on_gpu = device.type == "cuda"
    where = DeviceType.CUDA if on_gpu else DeviceType.CPU
    total: dict[str, float] = {}
    for event in events:
        if event.device_type != where or event.is_user_annotation:
            continue
        us = event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total
        if us > 0:
            total[event.name] = total.get(event.name, 0.0) + us / 1e3
    return total


def by_kernel(calls: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """The times of each kernel over the calls, 0 where a call has none; most time by the median first."""
    names = dict.fromkeys(name for call in calls for name in call)
    times = {name: [call.get(name, 0.0) for call in calls] for name in names}
    return dict(sorted(times.items(), key=lambda item: -float(np.median(item[1]))))


@cache
def kind_of(kernel: str) -> str:
    """The kind of a kernel by its name; ``other`` when no pattern matches."""
    return next((kind for kind, pattern, _ in KINDS if re.search(pattern, kernel, re.IGNORECASE)), OTHER)


def by_kind(medians: Mapping[str, float]) -> dict[str, float]:
    """The sum over the kernels of each kind, in the order of the kinds; 0 for a kind without any."""
    total = dict.fromkeys(COLOURS, 0.0)
    for kernel, ms in medians.items():
        total[kind_of(kernel)] += ms
    return total


def rows_of(
    times: Mapping[str, Sequence[Mapping[str, float]]],
    refused: Mapping[str, str | None],
    tokens: int,
    device: torch.device,
) -> list[Row]:
    """Rows by kind of every method, with their total, and then rows by kernel.

    Args:
        times: milliseconds by kernel of each call, by method; has every method that is not refused.
        refused: every method, and why it does not run here.
        tokens: tokens of the block.
        device: where it ran.
    """
    kinds: list[Row] = []
    kernels: list[Row] = []
    where = environment(device)

    def row(benchmark: str, method: str, variant: str, ms: float | None, **more: Any) -> Row:
        case = {"tokens": tokens, "method": method}
        cells: dict[str, Any] = {"ms_p20": None, "ms_p80": None, "extra": {}, "unavailable": None, **more}
        repetitions = len(times.get(method, ()))
        return Row(
            benchmark, case, variant, ms, repetitions=repetitions, gb_s=None, tflop_s=None, environment=where, **cells
        )

    for method, reason in refused.items():
        if reason is not None:
            kinds.append(row(BY_KIND, method, TOTAL, None, unavailable=reason))
            continue
        spread = {name: np.percentile(ms, (20, 50, 80)).tolist() for name, ms in by_kernel(times[method]).items()}
        sums = by_kind({name: median for name, (_, median, _) in spread.items()})
        total = sum(sums.values())
        for kind, ms in {**sums, TOTAL: total}.items():
            kinds.append(row(BY_KIND, method, kind, ms, extra={"percent": 100 * ms / total}))
        for name, (low, ms, high) in spread.items():
            about = {"percent": 100 * ms / total, "kind": kind_of(name)}
            kernels.append(row(BY_KERNEL, method, name, ms, ms_p20=low, ms_p80=high, extra=about))
    return kinds + kernels


def for_console(rows: Iterable[Row]) -> list[Row]:
    """The rows without kernels of known kind after the first few of a method, and with names cut short."""
    shown: list[Row] = []
    rank: dict[object, int] = {}
    for row in rows:
        if row.benchmark == BY_KERNEL:
            method = row.case["method"]
            rank[method] = rank.get(method, 0) + 1
            if rank[method] > SHOWN and row.extra["kind"] != OTHER:
                continue
            name = row.variant.removeprefix("void ")
            row = replace(row, variant=escape(name if len(name) <= NAME_WIDTH else name[: NAME_WIDTH - 1] + "…"))
        shown.append(row)
    return shown


def read_records(path: Path) -> list[dict[str, Any]]:
    """The rows of a CSV file by column, as text.

    Raises:
        OSError: the file cannot be read.
        ValueError: it has other columns than a benchmark's.
    """
    with path.open(newline="") as file:
        records: list[dict[str, Any]] = list(csv.DictReader(file))
    if records and not {"benchmark", "case", "variant", "ms", "unavailable", "gpu"} <= records[0].keys():
        raise ValueError(f"has the columns {', '.join(records[0])}; give a file that --csv wrote")
    return records


def bars(records: Iterable[Mapping[str, Any]]) -> tuple[str, dict[int, Bars]]:
    """The GPU, and by number of tokens the milliseconds by method and kind, of rows as they stand in a CSV file.

    Raises:
        ValueError: no such row, rows of several GPUs or of several runs, or a kind that is none.
    """
    gpus: dict[str, None] = {}
    found: dict[int, Bars] = {}
    for record in records:
        kind = record["variant"]
        if record["benchmark"] != BY_KIND or kind == TOTAL:
            continue
        case = json.loads(record["case"])
        tokens, method = case["tokens"], case["method"]
        if kind not in COLOURS:
            raise ValueError(f"unknown kind {kind!r}, the kinds are {', '.join(COLOURS)}: profile anew")
        of_method = found.setdefault(tokens, {}).setdefault(method, {})
        if kind in of_method:
            raise ValueError(f"{method} at {tokens} tokens is there twice: write each run to a file of its own")
        of_method[kind] = float(record["ms"])
        gpus[record["gpu"]] = None
    if not found:
        raise ValueError(f"no row of {BY_KIND!r} with times: there is nothing to draw")
    if len(gpus) > 1:
        raise ValueError(f"rows of {' and '.join(gpus)}: write each GPU's to a file of its own")
    return next(iter(gpus)), found


def draw(png: Path, gpu: str, by_tokens: Mapping[int, Bars]) -> None:
    """Save a picture for each number of tokens: ``png``, or ``png`` with ``-TOKENS`` added when they are several."""
    for tokens, times in by_tokens.items():
        path = png if len(by_tokens) == 1 else png.with_stem(f"{png.stem}-{tokens}")
        save_bars(path, times, f"Kernel time of a DiT block, {tokens:,} tokens, {gpu}")


def save_bars(path: Path, times: Mapping[str, Mapping[str, float]], title: str) -> None:
    """Save a PNG with one bar a method, stacked by kind in the order of the kinds.

    Args:
        path: the PNG.
        times: milliseconds by method and kind; a kind may be missing.
        title: above the bars.

    Raises:
        ValueError: no method.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if not times:
        raise ValueError("a picture of a profile needs at least one method")
    methods = list(times)
    longest = max(sum(kinds.values()) for kinds in times.values())
    figure = Figure(figsize=(11, 1.6 + 0.6 * len(methods)), layout="constrained")
    axes = figure.subplots()
    left = dict.fromkeys(methods, 0.0)
    for kind, colour in COLOURS.items():
        widths = [times[method].get(kind, 0.0) for method in methods]
        if not any(widths):
            continue
        drawn = axes.barh(methods, widths, left=list(left.values()), color=colour, label=kind, height=0.7)
        labels = [f"{width:.3g}" if width > 0.025 * longest else "" for width in widths]
        axes.bar_label(drawn, labels, label_type="center", fontsize="small")
        left = {method: left[method] + width for method, width in zip(methods, widths, strict=True)}
    for row, total in enumerate(left.values()):
        axes.text(total + 0.008 * longest, row, f"{total:.1f} ms", va="center", fontweight="bold")
    axes.invert_yaxis()
    axes.set_xlim(0, 1.1 * longest)
    axes.set_xlabel("ms a call, gaps between kernels left out")
    axes.set_title(title)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(str(path))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    typer.run(main)
