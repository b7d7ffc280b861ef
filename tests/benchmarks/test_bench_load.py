"""The load benchmark: real loads on the CPU at a tiny size, and what becomes of their numbers and failures."""

from __future__ import annotations

import csv
import gc
import json
import mmap
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import bench_load
import load_once
import numpy as np
import pytest
import weight_files
from synthetic_h3 import TINY, write_synthetic_h3
from typer.testing import CliRunner

from vllm_h3_quant.config.names import REPLACE_VARIABLE
from vllm_h3_quant.export.config import parse_request
from vllm_h3_quant.export.run import export

BENCHMARKS = Path(bench_load.__file__).parent

IN_ONE_PROCESS = """
import bench_load, load_once, typer, weight_files
scripts = {"load_once.py": load_once.load, "weight_files.py": weight_files.measure}
bench_load._Bench._run = lambda self, script, request, name: scripts[script](request)
typer.run(bench_load.main)
"""
"""The benchmark without a process for each load: importing the engine takes longer than a tiny load."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_synthetic_h3(tmp_path_factory.mktemp("model") / "h3", layers=1, architecture=TINY, block=4093)


@pytest.fixture
def scripts(stand_ins: Callable[[ModuleType], Path]) -> Path:
    """A folder for what stands in for the two scripts that the benchmark starts."""
    return stand_ins(bench_load)


def bench(*arguments: object) -> Any:
    app = bench_load.typer.Typer()
    app.command()(bench_load.main)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def rows(out: Path) -> dict[str, dict[str, Any]]:
    with (out / "load.csv").open(newline="") as file:
        found = [
            {**row, "case": json.loads(row["case"]), "extra": json.loads(row["extra"])} for row in csv.DictReader(file)
        ]
    return {row["variant"]: row for row in found}


def result(weights_s: float, final: int, peak: int) -> dict[str, Any]:
    return {
        "weights_s": weights_s,
        "load_s": weights_s + 1,
        "device": {"final": final, "peak": peak, "reserved": peak, "pinned": None},
        "host": {"host": 3 * 2**30, "anonymous": 2**30, "file": 2**31, "shared": None},
        "environment": {**vars(bench_load.environment(bench_load.torch.device("cpu"))), "gpu": "a GPU"},
    }


def replies(folder: Path, script: str, *bodies: object) -> None:
    """Let ``script`` write each of the results in turn, or run what is given as text."""
    for index, body in enumerate(bodies):
        text = body if isinstance(body, str) else f"Path(sys.argv[2]).write_text({json.dumps(body)!r})"
        (folder / f"{script}.{index}").write_text(text)
    (folder / script).write_text(
        "import sys, time\nfrom pathlib import Path\n"
        "body = min(Path(__file__).parent.glob(Path(__file__).name + '.*'))\n"
        "text = body.read_text()\nbody.unlink()\nexec(text)\n"
    )


def test_loads_on_the_cpu(tmp_path: Path) -> None:
    arguments = ["--model", tmp_path / "h3", "--layers", 1, "--tiny", "--out", tmp_path / "out"]
    arguments += ["--variants", "bf16,h3_fp8"]
    done = subprocess.run(
        [sys.executable, "-c", IN_ONE_PROCESS, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "PYTHONPATH": str(BENCHMARKS), "COLUMNS": "200"},
    )
    assert done.returncode == 0, done.stderr
    found = rows(tmp_path / "out")
    assert list(found) == ["plain read", "bf16", "h3_fp8"]
    nbytes = weight_files.total_bytes(weight_files.weight_files(tmp_path / "h3"))
    for name, row in found.items():
        assert row["case"] == {"layers": 1, "hidden": 192, "files": "warm"}
        assert row["extra"]["GiB"] == nbytes / 2**30
        assert float(row["gb_s"]) * float(row["ms"]) * 1e6 == pytest.approx(nbytes)
        assert (row["gpu"], row["repetitions"], row["unavailable"]) == ("cpu", "1", "")
        assert name in done.stdout
    for name in ("bf16", "h3_fp8"):
        extra = found[name]["extra"]
        assert {extra[key] for key in ("device", "device peak", "over final", "reserved", "pinned")} == {None}
        assert 0 < float(found[name]["ms"]) < extra["load s"] * 1e3
        assert 0 < extra["anon"] <= extra["host peak"] < 2
        assert extra["of plain read"] == pytest.approx(float(found["plain read"]["ms"]) / float(found[name]["ms"]))


def test_medians_of_repeated_loads(model: Path, tmp_path: Path, scripts: Path) -> None:
    """And the request: an offload becomes a field of the engine, an export asks for no method."""
    exported = tmp_path / "exported"
    export(model, exported, parse_request({"transformer": "h3_fp8"}, where="test"))
    plain = {"seconds": [2.0, 4.0, 3.0], "cached": [1.0, None, 1.0], "environment": result(1, 1, 1)["environment"]}
    replies(scripts, "weight_files.py", plain, plain)
    keep = "import shutil; shutil.copy(sys.argv[1], Path(__file__).parent / f'{time.time_ns()}.asked');"
    loads = [result(4.0, 10 * 2**30, 11 * 2**30), result(6.0, 10 * 2**30, 13 * 2**30), result(5.0, 2**33, 2**34)]
    bodies = [keep + f"Path(sys.argv[2]).write_text({json.dumps(load)!r})" for load in loads]
    replies(scripts, "load_once.py", *bodies, *bodies)
    done = bench(
        *("--model", model, "--export", exported, "--out", tmp_path, "--repeats", 3),
        *("--variants", "h3_fp8@layerwise,export"),
    )
    assert done.exit_code == 0, done.output
    found = rows(tmp_path)
    assert list(found) == ["plain read", "h3_fp8@layerwise", "plain read of export", "export"]
    assert [float(row["ms"]) for row in found.values()] == [3000, 5000, 3000, 5000]
    assert found["plain read"]["extra"]["cached"] == 1
    extra = found["export"]["extra"]
    assert [extra[key] for key in ("device", "device peak", "over final", "load s")] == [10, 13, 3, 6]
    assert [extra[key] for key in ("host peak", "anon", "file", "shmem", "of plain read")] == [3, 1, 2, None, 0.6]
    assert found["export"]["gpu"] == "a GPU"
    asked = [json.loads(file.read_text()) for file in sorted(scripts.glob("*.asked"))]
    assert asked[0] == {"model": str(model), "quantization": "h3_fp8", "fields": {"enable_layerwise_offload": True}}
    assert asked[3] == {"model": str(exported), "quantization": None, "fields": {}}


@pytest.mark.parametrize(
    ("body", "limit", "reason"),
    [
        ("print('one'); raise SystemExit('no room')", 60, r"exit code 1, see \S+load\.log: no room"),
        ("pass", 60, r"exit code 0, see \S+load\.log: it said nothing"),
        ("time.sleep(600)", 5, r"took more than 5 s, see \S+load\.log"),
    ],
)
def test_a_load_that_fails_is_a_row(
    model: Path, tmp_path: Path, scripts: Path, body: str, limit: int, reason: str
) -> None:
    """With the reason in place of times; the variants after it are still measured."""
    fine = {"seconds": [2.0], "cached": [1.0], "environment": result(1, 1, 1)["environment"]}
    replies(scripts, "weight_files.py", fine)
    replies(scripts, "load_once.py", body, result(4.0, 2**30, 2**31))
    start = time.monotonic()
    done = bench("--model", model, "--out", tmp_path, "--variants", "fp8,h3_int8", "--limit", limit)
    assert time.monotonic() - start < 120
    assert done.exit_code == 1
    found = rows(tmp_path)
    assert found["fp8"]["ms"] == ""
    assert found["fp8"]["gpu"] == "a GPU"
    assert re.fullmatch(reason, found["fp8"]["unavailable"])
    assert float(found["h3_int8"]["ms"]) == 4000


@pytest.mark.parametrize(
    ("variants", "message"),
    [
        ("bf16,h3_fp7", "unknown variant 'h3_fp7', choose from bf16, fp8, int8, h3_fp8"),
        ("h3_fp8@disk", "unknown offload 'disk' in 'h3_fp8@disk', choose from cpu, layerwise"),
        ("h3_fp8@", "unknown offload '' in 'h3_fp8@', choose from cpu, layerwise"),
        ("bf16,bf16", "a variant is given twice in 'bf16,bf16'"),
        ("int8", f"{REPLACE_VARIABLE} serves 'int8' with this package"),
    ],
)
def test_bad_variants(variants: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REPLACE_VARIABLE, "int8")
    with pytest.raises(ValueError) as raised:
        bench_load.check_variants(variants)
    assert message in str(raised.value)


@pytest.mark.parametrize("option", ["--model", "--export"])
def test_a_folder_without_a_model(model: Path, tmp_path: Path, option: str) -> None:
    roots = {"--model": model, option: tmp_path / "none"}
    done = bench(*(part for pair in roots.items() for part in pair), "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert "is no model root" in done.output
    assert not (tmp_path / "out").exists()


def test_a_model_that_is_no_export(model: Path, tmp_path: Path) -> None:
    """It would be measured as one."""
    done = bench("--model", model, "--export", model, "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert f"--export {model} is MiniMax-H3 bf16; write one with vllm-h3-quant export" in done.output.replace("\n", "")
    assert not (tmp_path / "out").exists()


def test_an_export_without_its_root(model: Path, tmp_path: Path) -> None:
    done = bench("--model", model, "--variants", "h3_fp8,export@layerwise", "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert "--variants: export@layerwise is a load of an exported model; give its root with --export" in done.output
    assert not (tmp_path / "out").exists()


def test_a_name_of_the_engine_that_is_served_by_us(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among the variants that nobody asked for by name."""
    monkeypatch.setenv(REPLACE_VARIABLE, "fp8")
    done = bench("--model", model, "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert f"{REPLACE_VARIABLE} serves 'fp8' with this package" in done.output
    assert not (tmp_path / "out").exists()


def test_an_export_is_loaded_where_one_is_given(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(bench_load, "check_export", lambda root: None)
    monkeypatch.setattr(
        bench_load._Bench, "measure", lambda self, root, title, loads: measured.append((title, [*map(str, loads)]))
    )
    assert bench("--model", model, "--out", tmp_path).exit_code == 0
    assert bench("--model", model, "--export", model, "--out", tmp_path).exit_code == 0
    online = ("plain read", ["bf16", "fp8", "h3_fp8", "h3_int8"])
    assert measured == [online, online, ("plain read of export", ["export"])]


def test_another_synthetic_model_at_the_place(model: Path, tmp_path: Path) -> None:
    done = bench("--model", model, "--layers", 2, "--tiny", "--out", tmp_path)
    assert done.exit_code == 2
    assert "is no synthetic model of these sizes" in done.output


def test_a_plain_read_reads_every_byte_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes around a piece's, with short reads in between."""
    monkeypatch.setattr(weight_files, "CHUNK", 1000)
    sizes = (1, 999, 1000, 1001, 5500)
    files = [tmp_path / f"{size}" for size in sizes]
    for file, size in zip(files, sizes, strict=True):
        file.write_bytes(bytes(size))
    read: list[tuple[int, int]] = []
    original = os.preadv

    def preadv(descriptor: int, buffers: list[Any], position: int) -> int:
        got = original(descriptor, [buffers[0][:700]], position)
        read.extend((descriptor, position + offset) for offset in range(got))
        return got

    monkeypatch.setattr(weight_files.os, "preadv", preadv)
    assert weight_files.plain_read(files, threads=3) > 0
    assert len(read) == len(set(read)) == sum(sizes)
    monkeypatch.setattr(weight_files.os, "preadv", lambda *_: 0)
    with pytest.raises(OSError, match="a file ends"):
        weight_files.plain_read(files, threads=3)


def test_pages_of_files(tmp_path: Path) -> None:
    """What was just written is cached; how much is dropped is the system's choice, but never another file's pages."""
    kept, dropped = tmp_path / "kept", tmp_path / "dropped"
    for file in (kept, dropped):
        file.write_bytes(bytes(2**20 + 1))
    if weight_files.cached([kept]) is None:
        pytest.skip("this system does not tell what is cached")
    weight_files.drop_pages([dropped])
    assert weight_files.cached([kept]) == 1
    left = weight_files.cached([dropped])
    assert left is not None
    assert 0 <= left <= 1
    both = weight_files.cached([kept, dropped])
    assert both == pytest.approx((1 + left) / 2)
    dropped.read_bytes()
    assert weight_files.cached([dropped]) == 1


def test_memory_of_the_host(tmp_path: Path) -> None:
    """Counters of resident pages lag by up to 64 pages a core: less than 1 MiB."""
    if "RssAnon" not in load_once.status():
        pytest.skip("this system does not tell anonymous memory from files")
    slack, mib = 2**20, 2**20
    (tmp_path / "file").write_bytes(bytes(48 * mib))
    gc.collect()
    with load_once.HostMemory() as memory:
        own = mmap.mmap(-1, 32 * mib, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # no page that an allocator kept
        for _ in range(32):
            own.write(bytes(mib))
        mapped = np.memmap(tmp_path / "file", dtype=np.uint8, mode="r")
        assert mapped.sum() == 0
        deadline = time.monotonic() + 20
        while (memory.peaks()["file"] or 0) < 40 * mib and time.monotonic() < deadline:
            time.sleep(load_once.INTERVAL_S)
        own.close()
        del mapped
    peaks = memory.peaks()
    anonymous, file, host = (peaks[name] or 0 for name in ("anonymous", "file", "host"))
    assert 32 * mib - slack < anonymous < 40 * mib
    # The system may take pages of a file back before the last is touched; the loop waited for this many.
    assert 40 * mib <= file < 56 * mib
    assert anonymous + 40 * mib - 2 * slack < host < 96 * mib
