"""Bytes of a MiniMax-H3 DiT on the device and on the host in each mode, from its architecture and beside measured ones.

A quantized linear has a byte a weight and an fp32 scale an output; all else is bf16, or fp32 where the engine requires
it. What a mode holds follows:

=============  ============================================  =============================
offload        device                                        host
=============  ============================================  =============================
none           all                                           nothing
``layerwise``  all but the blocks, and one of them at rest,  the blocks
               two in a step
``dlo``        all but blocks and token refiner, and two     the blocks, those of the token
               buffers of the largest                        refiner too
=============  ============================================  =============================

``+host`` moves the weights of AdaLN's projections to the host and leaves their biases; in a step it has outputs for a
schedule, two timesteps a step. Without a method of this package PyTorch pins the blocks, each dtype of each in a power
of two; what distributed offload then keeps is the engine's choice and not stated. The measured device is what
``bench_offload.py`` calls ``rest`` without ``others``, the measured host its ``own`` and ``torch``; ``beyond`` is the
peak of a step over what is stated, mostly activations. Rows of one rank and of the same schedule are compared.

    python benchmarks/bench_memory.py --model /tmp/h3 --measured out/offload.csv
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from math import prod
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from figures import GIB, unmeasured
from harness.report import Environment, Row, environment, print_table, untimed
from model_folder import architecture
from offload_modes import ADALN, OFFLOADS, Mode

from vllm_h3_quant.config.schema import H3QuantOptions, parse
from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.loader.architecture import ROPE, Architecture, Expected
from vllm_h3_quant.methods.scope import Storage, decide, role_of

METHODS = ("bf16", "h3_fp8")
ROLES = ("blocks", "AdaLN", "token refiner", "rest")
TIMESTEPS = 2
"""Rows of AdaLN in a step of a clip with audio, each with a timestep of its own."""


@dataclass(frozen=True)
class Held:
    """Bytes that a mode is to hold.

    Attributes:
        device: at rest, once offload is on.
        step: in a step; activations are not counted.
        host: by the weights.
    """

    device: int
    step: int
    host: int


def main(
    model: Annotated[Path, typer.Option(help="Model root; its configuration is enough.")],
    measured: Annotated[Path | None, typer.Option(help="offload.csv of bench_offload.py with the same model.")] = None,
    schedule: Annotated[int, typer.Option(min=1, help="Steps for which AdaLN's outputs are kept.")] = 50,
) -> None:
    """State what memory each way to hold a MiniMax-H3 takes, and compare it with what was measured."""
    try:
        arch = architecture(model)
        found = read_measured(measured, arch, schedule) if measured else {}
    except H3QuantError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    case = {"layers": arch.num_layers, "hidden": arch.hidden_size}
    by_role = {method: bytes_by_role(arch, Mode(method)) for method in METHODS}
    rows = [
        _row("GiB by role", case, role, {method: by_role[method][role] / GIB for method in METHODS}) for role in ROLES
    ]
    rows.append(_row("GiB by role", case, "all", {method: sum(by_role[method].values()) / GIB for method in METHODS}))
    for mode in modes():
        cells = in_gib(stated(arch, mode, schedule))
        if row := found.get(str(mode)):
            cells_beside = beside(cells, json.loads(row["extra"]))
            values: dict[str, Any] = {field.name: row[field.name] or None for field in fields(Environment)}
            rows.append(_row("GiB by mode", case, str(mode), {**cells, **cells_beside}, Environment(**values)))
        else:
            rows.append(_row("GiB by mode", case, str(mode), cells))
    print_table(rows)


def modes() -> Iterator[Mode]:
    """Those that are stated."""
    for method in METHODS:
        for adaln in (None, *ADALN) if method != "bf16" else (None,):
            for offload in (None, *OFFLOADS):
                if (method, offload) != ("bf16", "dlo"):
                    yield Mode(method, adaln, offload)


def bytes_by_role(arch: Architecture, mode: Mode) -> dict[str, int]:
    """Bytes of all weights by what they are for."""
    options = _options(mode)
    found = dict.fromkeys(ROLES, 0)
    for name, expected in _tensors(arch).items():
        found[_role(name)] += _nbytes(name, expected, options)
    return found


def stated(arch: Architecture, mode: Mode, schedule: int) -> Held:
    """What a mode is to hold, by the architecture alone.

    Args:
        arch: sizes of the DiT, which has two blocks or more.
        mode: how it is held.
        schedule: steps of which AdaLN's outputs are kept where its weights are on the host.
    """
    options = _options(mode)
    device = host = outputs = 0
    streamed: Counter[str] = Counter()
    pinned: Counter[tuple[str, bool]] = Counter()
    for name, expected in _tensors(arch).items():
        linear, _, kind = name.rpartition(".")
        nbytes, block = _nbytes(name, expected, options), _streamed(name, mode.offload)
        hosted = options is not None and decide(options, linear).storage is Storage.HOST
        if hosted and kind == "weight":
            host += nbytes
            outputs += 2 * TIMESTEPS * schedule * expected.shape[0]
        elif block and not hosted:
            streamed[block] += nbytes
            pinned[block, expected.fp32] += nbytes
        else:
            device += nbytes
    largest = max(streamed.values(), default=0)
    at_rest = 1 if mode.offload == "layerwise" else 2
    host += sum(map(_power_of_two, pinned.values()) if options is None else streamed.values())
    return Held(device + at_rest * largest, device + 2 * largest + outputs, host)


def _power_of_two(nbytes: int) -> int:
    """The least that is no smaller."""
    return 1 << (nbytes - 1).bit_length()


def read_measured(path: Path, arch: Architecture, schedule: int) -> dict[str, Mapping[str, str]]:
    """Rows of ``bench_offload.py`` by variant, the last one of each.

    Raises:
        H3QuantError: the file has none of this model and schedule on one rank.
    """
    wanted = {"layers": arch.num_layers, "hidden": arch.hidden_size, "schedule": schedule, "ulysses": 1}
    found: dict[str, Mapping[str, str]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            case = json.loads(row["case"])
            same = wanted.items() <= case.items()
            if row["benchmark"] == "offload" and same and not row["unavailable"]:
                found[row["variant"]] = row
    if not found:
        raise H3QuantError(
            f"{path}: no row of bench_offload.py with {arch.num_layers} layers of {arch.hidden_size}, a schedule of"
            f" {schedule} and one rank; measure the model that --model names"
        )
    return found


def in_gib(held: Held) -> dict[str, float]:
    """The cells of a mode by the architecture."""
    return {"device": held.device / GIB, "in a step": held.step / GIB, "host": held.host / GIB}


def beside(cells: Mapping[str, float], measured: Mapping[str, Any]) -> dict[str, float | None]:
    """The cells that compare with what was measured of a mode."""
    rest, peak, others = measured["rest"], measured["step peak"], measured["others"] or 0
    device = None if rest is None else rest - others
    pinned = measured["torch"]  # unknown without a GPU, where the engine's copies are plain memory
    host = None if not measured["own"] and pinned is None else measured["own"] + (pinned or 0)
    return {
        "measured device": device,
        "device off %": _percent(device, cells["device"]),
        "measured host": host,
        "host off %": _percent(host, cells["host"]),
        "beyond": None if peak is None else peak - others - cells["in a step"],
    }


def _percent(measured: float | None, by_architecture: float) -> float | None:
    return None if measured is None or not by_architecture else 100 * (measured / by_architecture - 1)


def _options(mode: Mode) -> H3QuantOptions | None:
    if mode.method == "bf16":
        return None
    return parse(mode.method, {"adaln": mode.adaln} if mode.adaln else None, where="the mode")


def _tensors(arch: Architecture) -> dict[str, Expected]:
    """What the engine's DiT has, by name."""
    return {name: tensor for name, tensor in arch.tensors().items() if not tensor.optional or name == ROPE}


def _nbytes(name: str, expected: Expected, options: H3QuantOptions | None) -> int:
    linear, _, kind = name.rpartition(".")
    if kind == "weight" and options is not None and decide(options, linear).storage is Storage.CODES:
        return prod(expected.shape) + 4 * expected.shape[0]
    return prod(expected.shape) * (4 if expected.fp32 else 2)


def _role(name: str) -> str:
    role = role_of(name.rpartition(".")[0])
    if role is not None and role.adaln:
        return "AdaLN"
    return {"blocks": "blocks", "token_refiner": "token refiner"}.get(name.split(".")[0], "rest")


def _streamed(name: str, offload: str | None) -> str | None:
    """The block that a tensor is copied with, where it is."""
    parts = name.split(".")
    if offload and parts[0] == "blocks":
        return ".".join(parts[:2])
    if offload == "dlo" and parts[:2] == ["token_refiner", "blocks"]:
        return ".".join(parts[:3])
    return None


def _row(
    benchmark: str,
    case: Mapping[str, object],
    variant: str,
    extra: Mapping[str, object],
    where: Environment | None = None,
) -> Row:
    return untimed(benchmark, case, variant, extra, where or unmeasured([], environment(torch.device("cpu"))))


if __name__ == "__main__":
    typer.run(main)
