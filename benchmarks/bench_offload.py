"""Steps of a whole MiniMax-H3 DiT with its weights on the device and in host memory: seconds, and bytes of both.

Each variant is a process of its own that loads the pipeline without its text encoder, enables the engine's offload as
its runner does and runs the first steps of a request: one, and then those that ``ms`` is the median of. ``same bytes``
compares their outputs with those of the resident variant of the same weights, which runs first: ``METHOD``, and
``METHOD+keep`` where AdaLN is kept; that one's own ranks and repetitions with each other. Where they are not the same,
the exit code is 1. GiB throughout:

    over loaded        the device's peak in the load, over what the load left there
    rest, others       the device once offload is on; of that what is not of the DiT
    step peak          the device's peak in a step
    own, foreign       host pages of this package, and those that a rank maps from another
    pinned, torch      of both registered with CUDA; page-locked memory of PyTorch
    anon, shmem        the process's own peak up to then, over what it had before

With ``--ulysses`` a variant is as many processes that share its sequence: the device's figures are the largest of a
rank, the host's the sum. ``adaln first`` is the pass over AdaLN's projections in host memory for a whole schedule,
``adaln later`` what is left of it in the next request, both in ms and no part of a step.

    python benchmarks/bench_offload.py --model /tmp/h3 --out out
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from figures import difference, gib, median, scaled, spread, unmeasured
from harness.engine import free_port
from harness.report import Environment, Row, environment, print_table, write_csv
from model_folder import architecture
from offload_modes import Mode, parse_modes
from processes import NotMeasured, run
from shapes import TOKENS

from vllm_h3_quant.errors import H3QuantError

HERE = Path(__file__).parent
METHODS = "bf16,fp8,h3_fp8,h3_fp8+keep"
VARIANTS = f"{METHODS},bf16@layerwise,fp8@layerwise,h3_fp8@layerwise,bf16@dlo,fp8@dlo,h3_fp8@dlo"
HOSTED = "h3_fp8+host,h3_fp8+host@layerwise,h3_fp8+host@dlo"
SHOWN = (
    *("min", "max", "load s", "over loaded", "rest", "step peak", "adaln first", "adaln later"),
    *("own", "foreign", "pinned", "anon", "same bytes"),
)


def main(
    model: Annotated[Path, typer.Option(help="Model root.")],
    out: Annotated[Path, typer.Option(help="Folder of offload.csv and offload.log, which are appended to.")],
    variants: Annotated[
        str, typer.Option(metavar="V,..", help="METHOD[+ADALN][@OFFLOAD], such as h3_fp8+host@dlo.")
    ] = f"{VARIANTS},{HOSTED}",
    tokens: Annotated[int, typer.Option(min=1, help="Packed tokens of the clip, or a little more.")] = TOKENS[4],
    steps: Annotated[int, typer.Option(min=1, help="Timed steps, after one that is not.")] = 3,
    schedule: Annotated[int, typer.Option(min=2, help="Steps of the request.")] = 50,
    repeats: Annotated[int, typer.Option(min=1, help="Processes of each variant.")] = 1,
    ulysses: Annotated[int, typer.Option(min=1, help="Ranks that share a sequence, each with a device.")] = 1,
    limit: Annotated[float, typer.Option(min=1, help="Seconds that one variant's processes may take.")] = 280,
) -> None:
    """Time steps of a MiniMax-H3 under each way to hold its weights, and measure what memory they take."""
    try:
        if steps + 1 > schedule:
            raise H3QuantError(f"--steps {steps} and the one before them are more than --schedule {schedule}")
        modes = parse_modes(variants, where="--variants")
        found = architecture(model)
    except H3QuantError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    out.mkdir(parents=True, exist_ok=True)
    case = {
        "layers": found.num_layers,
        "hidden": found.hidden_size,
        "tokens": tokens,
        "schedule": schedule,
        "ulysses": ulysses,
    }
    request = {"model": str(model), "tokens": tokens, "schedule": schedule, "steps": steps + 1}
    bench = _Bench(out, case, request, repeats=repeats, ulysses=ulysses, limit=limit)
    for mode in sorted(modes, key=lambda mode: mode != mode.resident):
        bench.measure(mode)
    print_table([shown(row) for row in bench.rows])
    if any(row.unavailable or row.extra.get("same bytes") == "no" for row in bench.rows):
        raise typer.Exit(1)


class _Bench:
    """Measures and keeps the rows; each is in the file as soon as it is known."""

    def __init__(
        self,
        out: Path,
        case: Mapping[str, object],
        request: Mapping[str, Any],
        *,
        repeats: int,
        ulysses: int,
        limit: float,
    ) -> None:
        self.rows: list[Row] = []
        self._out = out
        self._case = case
        self._request = request
        self._repeats = repeats
        self._ulysses = ulysses
        self._limit = limit
        self._digests: dict[Mode, list[str]] = {}

    def measure(self, mode: Mode) -> None:
        """All repetitions of one variant."""
        request = {**self._request, "quantization": mode.quantization, "fields": mode.fields}
        try:
            found = [self._run(request, f"{mode}, {repeat + 1} of {self._repeats}") for repeat in range(self._repeats)]
        except NotMeasured as error:
            self._add(mode, [], {}, unavailable=str(error))
            return
        seconds = [seconds for ranks in found for seconds in ranks[0]["steps_s"][1:]]
        digests = [one["digest"] for ranks in found for one in ranks]
        self._digests[mode] = digests
        reference = self._digests.get(mode.resident, [])[:1]
        compared = [*reference, *digests] if mode != mode.resident else digests
        same = len(set(compared)) == 1 if reference and len(compared) > 1 else None
        extra = {**cells(found), "same bytes": None if same is None else "yes" if same else "no"}
        self._add(mode, seconds, extra, found[0][0]["environment"])

    def _run(self, request: Mapping[str, Any], name: str) -> list[Any]:
        """One result a rank.

        Raises:
            NotMeasured: a rank failed, or they took longer than the limit.
        """
        port = free_port()
        ranks = [{**request, "rank": rank, "ulysses": self._ulysses, "port": port} for rank in range(self._ulysses)]
        return run(HERE / "step_once.py", ranks, name, log=self._out / "offload.log", limit=self._limit)

    def _add(
        self,
        mode: Mode,
        seconds: Sequence[float],
        extra: Mapping[str, object],
        where: Mapping[str, Any] | None = None,
        unavailable: str | None = None,
    ) -> None:
        # This process asks no GPU, which would take memory of it.
        here = environment(torch.device("cpu"))
        row = Row(
            benchmark="offload",
            case=self._case,
            variant=str(mode),
            **spread(seconds),
            repetitions=len(seconds),
            gb_s=None,
            tflop_s=None,
            extra=extra,
            unavailable=unavailable,
            environment=Environment(**where) if where else unmeasured(self.rows, here),
        )
        self.rows.append(row)
        write_csv(self._out / "offload.csv", [row])


def shown(row: Row) -> Row:
    """A row with what fits a table; the file has all of it."""
    return replace(row, ms_p20=None, ms_p80=None, extra={name: row.extra.get(name) for name in SHOWN})


def cells(found: Sequence[Sequence[Any]]) -> dict[str, object]:
    """What a row tells beside the steps' median: medians over the repetitions, each the results of its ranks."""

    def device(read: Callable[[Any], int | None]) -> float | None:
        return gib([_combined(max, [read(one) for one in ranks]) for ranks in found])

    def host(read: Callable[[Any], int | None]) -> float | None:
        return gib([_combined(sum, [read(one) for one in ranks]) for ranks in found])

    def ms(read: Callable[[Any], float | None]) -> float | None:
        return scaled(median([read(ranks[0]) for ranks in found]), 1e3)

    steps = [seconds for ranks in found for seconds in ranks[0]["steps_s"][1:]]
    return {
        "packed": found[0][0]["tokens"],
        "load s": median([ranks[0]["load_s"] for ranks in found]),
        "offload s": median([ranks[0]["offload_s"] for ranks in found]),
        "over loaded": device(lambda one: difference(one["device"]["load_peak"], one["device"]["loaded"])),
        "rest": device(lambda one: one["device"]["rest"]),
        "others": device(lambda one: one["device"]["others"]),
        "step peak": device(lambda one: _combined(max, one["step_peak"])),
        "first": ms(lambda one: one["steps_s"][0]),
        "min": min(steps) * 1e3,
        "max": max(steps) * 1e3,
        "adaln first": ms(lambda one: one["adaln_s"][0] if one["adaln_s"] else None),
        "adaln later": ms(lambda one: one["adaln_s"][1] if one["adaln_s"] else None),
        "adaln passes": found[0][0]["adaln_passes"],
        "own": host(lambda one: one["host"]["held"]["own"]),
        "foreign": host(lambda one: one["host"]["held"]["foreign"]),
        "pinned": host(lambda one: one["host"]["held"]["pinned"]),
        "torch": host(lambda one: one["device"]["pinned"]),
        "anon": host(lambda one: one["host"]["peak"]["anonymous"]),
        "shmem": host(lambda one: one["host"]["peak"]["shared"]),
    }


def _combined(how: Callable[[list[int]], int], values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return how(known) if known else None


if __name__ == "__main__":
    typer.run(main)
