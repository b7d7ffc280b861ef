"""Steps under each way to hold a DiT: real ones on the CPU at a tiny size, and what becomes of their numbers."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import bench_memory
import bench_offload
import offload_modes
import processes
import pytest
from harness.denoise import Clip, largest_clip
from harness.report import COLUMNS
from model_folder import architecture
from offload_modes import ALL, Mode, parse_modes
from safetensors import safe_open
from shapes import TOKENS
from typer.testing import CliRunner

from vllm_h3_quant.config.names import REPLACE_VARIABLE
from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.loader.architecture import Architecture

BENCHMARKS = Path(bench_offload.__file__).parent
GIB = 2**30
SMALLEST = 256

IN_ONE_PROCESS = """
import bench_offload, processes, step_once, typer
bench_offload.run = lambda script, ranks, name, **more: [step_once.measure(rank) for rank in ranks]
typer.run(bench_offload.main)
"""
"""The benchmark without a process for each variant: importing the engine takes longer than tiny steps."""


@pytest.fixture(scope="module")
def measured(tiny_h3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``offload.csv`` of real steps."""
    out = tmp_path_factory.mktemp("measured")
    arguments = ["--model", tiny_h3, "--out", out, "--tokens", SMALLEST, "--steps", 1]
    arguments += ["--variants", "h3_fp8+host,h3_fp8@layerwise,h3_fp8,h3_fp8+keep,h3_fp8+host@dlo"]
    path = os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", IN_ONE_PROCESS, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in ("h3_fp8+host@dlo", "adaln first", "same bytes"))
    return out / "offload.csv"


@pytest.fixture
def scripts(stand_ins: Callable[[ModuleType], Path]) -> Path:
    """A folder for what stands in for the script that the benchmark starts."""
    return stand_ins(bench_offload)


def command(main: Callable[..., None], *arguments: object) -> Any:
    app = bench_offload.typer.Typer()
    app.command()(main)
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "300"})


def rows(file: Path) -> dict[str, dict[str, Any]]:
    with file.open(newline="") as stream:
        reader = csv.DictReader(stream)
        found = [{**row, "case": json.loads(row["case"]), "extra": json.loads(row["extra"])} for row in reader]
        assert tuple(reader.fieldnames or ()) == COLUMNS
    return {row["variant"]: row for row in found}


def result(digest: str = "a", *, steps: tuple[float, ...] = (9.0, 2.0, 4.0), scale: int = 1) -> dict[str, Any]:
    gib = scale * GIB
    return {
        "load_s": 3.0,
        "offload_s": 1.0,
        "device": {"load_peak": 7 * gib, "loaded": 5 * gib, "rest": 4 * gib, "others": gib, "pinned": 2 * gib},
        "host": {
            "peak": {"host": 9 * gib, "anonymous": 3 * gib, "file": 0, "shared": 6 * gib},
            "rest": {"host": 6 * gib, "anonymous": 0, "file": 0, "shared": 6 * gib},
            "held": {"own": 6 * gib, "foreign": 2 * gib, "pinned": 8 * gib},
        },
        "tokens": 320,
        "steps_s": list(steps),
        "step_peak": [10 * gib, 8 * gib, 9 * gib],
        "adaln_s": [0.5, 0.001],
        "adaln_passes": 1,
        "digest": digest,
        "environment": {**vars(bench_offload.environment(bench_offload.torch.device("cpu"))), "gpu": "a GPU"},
    }


def replies(folder: Path, answer: str) -> None:
    """Let the script run ``answer`` on its ``request``, and write the ``reply`` that is left."""
    (folder / "step_once.py").write_text(
        "import json, sys, time\nfrom pathlib import Path\n"
        "request, reply = json.loads(Path(sys.argv[1]).read_text()), None\n"
        f"{answer}\n"
        "Path(sys.argv[2]).write_text(json.dumps(reply))\n"
    )


def test_outputs_have_the_bytes_of_the_resident_variant(measured: Path) -> None:
    found = rows(measured)
    assert list(found) == ["h3_fp8", "h3_fp8+keep", "h3_fp8+host", "h3_fp8@layerwise", "h3_fp8+host@dlo"]
    for name, row in found.items():
        resident = name in ("h3_fp8", "h3_fp8+keep")  # nothing to compare with
        assert row["extra"]["same bytes"] == (None if resident else "yes")
        assert row["extra"]["packed"] == SMALLEST
        assert (row["benchmark"], row["gpu"], row["repetitions"], row["unavailable"]) == ("offload", "cpu", "1", "")
        assert row["case"] == {"layers": 3, "hidden": 192, "tokens": SMALLEST, "schedule": 50, "ulysses": 1}
        assert row["extra"]["min"] == row["extra"]["max"] == pytest.approx(float(row["ms"]))
        assert {row["extra"][name] for name in ("rest", "others", "step peak", "over loaded", "torch")} == {None}
        assert set(bench_offload.SHOWN) <= set(row["extra"])


def test_adaln_runs_once_for_a_schedule(measured: Path) -> None:
    found = {name: row["extra"] for name, row in rows(measured).items()}
    for name, extra in found.items():
        hosted = "+host" in name
        assert extra["adaln passes"] == (1 if hosted else None)
        assert (extra["adaln first"] is not None) == hosted
        assert (extra["adaln later"] is not None) == hosted


@pytest.mark.parametrize("name", ["h3_fp8", "h3_fp8@layerwise", "h3_fp8+host", "h3_fp8+host@dlo"])
def test_stated_host_bytes_are_those_held(measured: Path, tiny_h3: Path, name: str) -> None:
    stated = bench_memory.stated(architecture(tiny_h3), ALL[name], schedule=50)
    assert rows(measured)[name]["extra"]["own"] * GIB == pytest.approx(stated.host, rel=0.02)


def test_stated_bytes_are_those_of_the_checkpoint(tiny_h3: Path) -> None:
    """Of bf16; and no byte is in two places or in none."""
    arch, stored = architecture(tiny_h3), 0
    for file in (tiny_h3 / "FL2VA" / "transformer").glob("*.safetensors"):
        with safe_open(file, "pt") as source:
            stored += sum(source.get_tensor(name).nbytes for name in source.keys())  # noqa: SIM118
    assert sum(bench_memory.bytes_by_role(arch, Mode("bf16")).values()) == stored
    largest = 0
    for mode in bench_memory.modes():
        held = bench_memory.stated(arch, mode, schedule=0)
        if mode.offload == "layerwise":
            largest = held.step - held.device  # a block, which is larger than one of the token refiner
        copies = {None: 0, "layerwise": 1, "dlo": 2}[mode.offload]
        total = sum(bench_memory.bytes_by_role(arch, mode).values())
        if mode == Mode("bf16", offload="layerwise"):
            continue  # the engine's host memory is rounded
        assert held.device + held.host - copies * largest == total, mode


def test_stated_bytes_of_the_real_model() -> None:
    """Written out, so that a wrong derivation shows."""
    arch = Architecture()
    gib = {
        str(mode): [round(n / GIB, 2) for n in (held.device, held.step, held.host)]
        for mode in bench_memory.modes()
        for held in [bench_memory.stated(arch, mode, schedule=50)]
    }
    assert gib["bf16"] == [61.73, 61.73, 0]
    assert gib["bf16@layerwise"] == [2.81, 4.01, 100]
    assert gib["h3_fp8"] == [30.93, 30.93, 0]
    assert gib["h3_fp8@layerwise"] == [1.44, 2.04, 30.1]
    assert gib["h3_fp8@dlo"] == [1.32, 1.32, 30.81]
    assert gib["h3_fp8+keep"] == [43.05, 43.05, 0]
    assert gib["h3_fp8+host"] == [18.77, 19.68, 24.28]
    assert gib["h3_fp8+host@layerwise"] == [1.18, 2.44, 42.24]
    assert gib["h3_fp8+host@dlo"] == [0.82, 1.72, 42.95]


def test_memory_beside_what_was_measured(measured: Path, tiny_h3: Path, tmp_path: Path) -> None:
    done = command(bench_memory.main, "--model", tiny_h3, "--measured", measured)
    assert done.exit_code == 0, done.output
    assert "measured host" in done.output
    assert "measured" not in command(bench_memory.main, "--model", tiny_h3).output
    cells = bench_memory.in_gib(bench_memory.Held(device=2 * GIB, step=5 * GIB, host=4 * GIB))
    measures = {"rest": 4.0, "others": 1.0, "step peak": 10.0, "own": 3.0, "torch": 2.0}
    assert bench_memory.beside(cells, measures) == {
        "measured device": 3.0,
        "device off %": 50.0,
        "measured host": 5.0,
        "host off %": 25.0,
        "beyond": 4.0,
    }
    assert bench_memory.beside(cells, {**measures, "own": 0.0, "torch": None})["measured host"] is None
    for key, value, other in (("hidden", 192, 5376), ("ulysses", 1, 2), ("schedule", 50, 8)):
        text = measured.read_text().replace(f'""{key}"": {value}', f'""{key}"": {other}')
        (tmp_path / "other").write_text(text)
        done = command(bench_memory.main, "--model", tiny_h3, "--measured", tmp_path / "other")
        assert done.exit_code == 2
        assert "no row of bench_offload.py with 3 layers of 192, a schedule of 50 and one rank" in done.output


def test_ranks_and_repetitions(tiny_h3: Path, tmp_path: Path, scripts: Path) -> None:
    """Device figures are the largest rank's, the host's the sum; a digest that differs on any rank shows."""
    replies(
        scripts,
        f"rank, ours = request['rank'], request['quantization']\n"
        f"reply = {result('a', scale=1)!r} if rank == 0 else {result('a', scale=2)!r}\n"
        "if ours == {'method': 'h3_fp8', 'adaln': 'host'} and rank: reply['digest'] = 'b'\n"
        "(Path(__file__).parent / f'{time.time_ns()}.asked').write_text(json.dumps(request))",
    )
    arguments = ["--variants", "h3_fp8+host@dlo,h3_fp8+keep,h3_fp8@layerwise", "--tokens", "320"]
    arguments += ["--steps", 2, "--ulysses", 2, "--repeats", 2, "--schedule", 8]
    done = command(bench_offload.main, "--model", tiny_h3, "--out", tmp_path, *arguments)
    assert done.exit_code == 1, done.output
    found = rows(tmp_path / "offload.csv")
    assert [row["extra"]["same bytes"] for row in found.values()] == ["yes", "no", None]
    row = found["h3_fp8+host@dlo"]
    assert (float(row["ms"]), row["repetitions"], row["gpu"]) == (3000, "4", "a GPU")
    expected = {"min": 2000, "max": 4000, "first": 9000, "load s": 3, "offload s": 1, "adaln first": 500}
    expected |= {"over loaded": 4, "rest": 8, "others": 2, "step peak": 20, "packed": 320, "adaln later": 1}
    expected |= {"own": 18, "foreign": 6, "pinned": 24, "torch": 6, "anon": 9, "shmem": 18}
    assert {name: row["extra"][name] for name in expected} == expected
    asked = [json.loads(file.read_text()) for file in scripts.glob("*.asked")]
    assert len(asked) == 3 * 2 * 2
    assert sorted(one["rank"] for one in asked) == [0] * 6 + [1] * 6
    dlo = next(one for one in asked if one["fields"].get("enable_distributed_layerwise_offload"))
    shared = {"tokens": 320, "schedule": 8, "steps": 3, "ulysses": 2}
    assert {name: dlo[name] for name in shared} == shared
    assert dlo["quantization"] == {"method": "h3_fp8", "adaln": "host"}
    assert dlo["fields"]["dlo_use_allgather"] is False


def test_a_variant_that_fails_is_a_row(tiny_h3: Path, tmp_path: Path, scripts: Path) -> None:
    fails = "if request['fields']: print('[rank0]: e.E: no\\nx.OwnError: no room\\nbar 0%'); raise SystemExit(3)"
    replies(scripts, f"{fails}\nreply = {result()!r}")
    done = command(
        bench_offload.main, "--model", tiny_h3, "--out", tmp_path, "--variants", "bf16@dlo,bf16", "--steps", 2
    )
    assert done.exit_code == 1
    found = rows(tmp_path / "offload.csv")
    assert float(found["bf16"]["ms"]) == 3000
    assert found["bf16@dlo"]["ms"] == ""
    assert found["bf16@dlo"]["gpu"] == "a GPU"
    assert re.fullmatch(r"exit code 3, see \S+offload\.log: x.OwnError: no room", found["bf16@dlo"]["unavailable"])


def test_a_rank_that_fails_ends_the_others(tmp_path: Path, scripts: Path) -> None:
    replies(scripts, "if request['rank']: raise SystemExit('no room')\ntime.sleep(600)")
    start = time.monotonic()
    with pytest.raises(processes.NotMeasured, match=r"exit code 1, .*: no room"):
        processes.run(scripts / "step_once.py", [{"rank": 0}, {"rank": 1}], "two", log=tmp_path / "log", limit=100)
    with pytest.raises(processes.NotMeasured, match="took more than 1 s"):
        processes.run(scripts / "step_once.py", [{"rank": 0}], "one", log=tmp_path / "log", limit=1)
    assert time.monotonic() - start < 60


@pytest.mark.parametrize(
    ("variants", "message"),
    [
        ("bf16,h3_fp7", "unknown variant 'h3_fp7'; did you mean 'h3_fp8'?"),
        ("h3_fp8@layer", "unknown variant 'h3_fp8@layer'; did you mean 'h3_fp8@layerwise'?"),
        ("bf16+host", "unknown variant 'bf16+host'; did you mean "),
        ("?", "unknown variant '?'; A variant is METHOD[+ADALN][@OFFLOAD] of bf16, fp8, int8, h3_fp8"),
        ("bf16,bf16", "a variant is given twice in 'bf16,bf16'"),
        ("int8@dlo", f"{REPLACE_VARIABLE} serves 'int8' with this package"),
    ],
)
def test_bad_variants(
    variants: str, message: str, tiny_h3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(REPLACE_VARIABLE, "int8")
    done = command(bench_offload.main, "--model", tiny_h3, "--out", tmp_path / "out", "--variants", variants)
    assert done.exit_code == 2
    assert done.output.startswith(f"--variants: {message}")
    assert done.output.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_bad_arguments(tiny_h3: Path, tmp_path: Path) -> None:
    for arguments in (["--model", tmp_path], ["--model", tiny_h3, "--steps", 4, "--schedule", 4]):
        done = command(bench_offload.main, *arguments, "--out", tmp_path / "out")
        assert done.exit_code == 2
        assert "is no model root" in done.output or "more than --schedule 4" in done.output
    assert "is no model root" in command(bench_memory.main, "--model", tmp_path).output


def test_modes() -> None:
    assert parse_modes("bf16@dlo,h3_int8+host", where="w") == (Mode("bf16", offload="dlo"), Mode("h3_int8", "host"))
    assert [str(mode.resident) for mode in parse_modes("fp8@dlo,h3_fp8+host@dlo,h3_fp8@layerwise", where="w")] == [
        "fp8",
        "h3_fp8+keep",
        "h3_fp8",
    ]
    assert {str(mode): mode for mode in ALL.values()} == ALL
    assert Mode("bf16").quantization is None
    assert Mode("fp8", offload="layerwise").fields == {"enable_layerwise_offload": True}
    with pytest.raises(H3QuantError):
        parse_modes("", where="w")
    defaults = f"{bench_offload.VARIANTS},{bench_offload.HOSTED}"
    assert {mode.resident for mode in parse_modes(defaults, where="w")} <= set(parse_modes(defaults, where="w"))
    assert set(offload_modes.OFFLOADS) == {"layerwise", "dlo"}


def test_clips_have_the_tokens_of_the_shapes() -> None:
    for seconds, tokens in TOKENS.items():
        clip = largest_clip(tokens)
        assert (clip.width, clip.height) == (1344, 768)
        assert seconds <= clip.frames / 24 < seconds + 1
        assert 0 <= tokens - clip.tokens < 1024  # prompts are longer
    assert largest_clip(TOKENS[4]).tokens == TOKENS[4]
    assert largest_clip(TOKENS[4] - 1).tokens < TOKENS[4]
    assert largest_clip(10**6) == Clip(1344, 768, 362)
    assert largest_clip(SMALLEST).tokens == SMALLEST
    with pytest.raises(ValueError, match=f"ask for {SMALLEST} or more"):
        largest_clip(SMALLEST - 1)
