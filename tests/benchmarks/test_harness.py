"""The benchmark harness on a clock that the test moves: what is timed, in which order, and what is reported."""

from __future__ import annotations

import csv
import io
import json
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import measure as bench
from harness import report as bench_report
from harness.measure import (
    CudaStopwatch,
    HostStopwatch,
    Variant,
    VariantFailed,
    copy_variant,
    measure,
    turns,
)
from harness.report import COLUMNS, Row, print_table, write_csv
from rich.console import Console

from vllm_h3_quant import __version__

CPU = torch.device("cpu")


class Clock:
    """Stands for the module ``time``; only what is simulated takes time."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def pass_ms(self, ms: float) -> None:
        self.now += ms / 1e3


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(bench, "time", clock)
    return clock


def taking(clock: Clock, *ms: float) -> Callable[[], None]:
    """A call that takes the given times in turn."""
    times: Iterator[float] = iter(ms)
    return lambda: clock.pass_ms(next(times))


def table_of(rows: list[Row]) -> str:
    console = Console(file=io.StringIO(), width=200)
    print_table(rows, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


class TestTimes:
    def test_median_percentiles_and_rates(self, clock: Clock) -> None:
        variant = Variant("a", taking(clock, 5, 1, 4, 2, 3), flops=6e9, bytes=1.5e6)
        (row,) = measure("b", {}, [variant], device=CPU, repetitions=5, warmup=0)
        assert (row.ms, row.ms_p20, row.ms_p80) == pytest.approx((3.0, 1.8, 4.2))
        assert row.gb_s == pytest.approx(0.5), "1.5 MB in 3 ms"
        assert row.tflop_s == pytest.approx(2.0), "6 GFLOP in 3 ms"
        assert row.repetitions == 5

    def test_rates_that_were_not_asked_for_are_absent(self) -> None:
        (row,) = measure("b", {}, [Variant("a", lambda: None)], device=CPU, repetitions=1)
        assert (row.gb_s, row.tflop_s) == (None, None)

    def test_warmup_is_not_timed(self, clock: Clock) -> None:
        (row,) = measure("b", {}, [Variant("a", taking(clock, 90, 80, 1, 1))], device=CPU, repetitions=2, warmup=2)
        assert row.ms_p80 == pytest.approx(1.0)

    @pytest.mark.parametrize("flush", [True, False])
    def test_flush_comes_before_each_call_and_is_not_timed(
        self, clock: Clock, monkeypatch: pytest.MonkeyPatch, flush: bool
    ) -> None:
        events: list[str] = []

        def flushed(_: HostStopwatch) -> None:
            events.append("flush")
            clock.pass_ms(1000)

        def run() -> None:
            events.append("call")
            clock.pass_ms(2)

        monkeypatch.setattr(HostStopwatch, "flush", flushed)
        (row,) = measure("b", {}, [Variant("a", run)], device=CPU, repetitions=3, warmup=0, flush_l2=flush)
        assert row.ms == pytest.approx(2.0)
        assert events == (["flush", "call"] * 3 if flush else ["call"] * 3)

    def test_an_output_is_gone_before_the_next_call(self) -> None:
        class Output:
            pass

        alive: list[weakref.ref[Output]] = []

        def run() -> Output:
            assert all(ref() is None for ref in alive)
            output = Output()
            alive.append(weakref.ref(output))
            return output

        measure("b", {}, [Variant("a", run), Variant("b", run)], device=CPU, repetitions=2, warmup=2)
        assert len(alive) == 8

    def test_cuda_events_enclose_the_call_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        log: list[str] = []

        class Event:
            made = 0

            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing
                Event.made += 1
                self.number = Event.made

            def record(self) -> None:
                log.append(f"event {self.number}")

            def elapsed_time(self, end: Event) -> float:
                assert log[-1] == "wait", "read before the device is done"
                return float(end.number - self.number)

        class Properties:
            L2_cache_size = 1000

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda _: log.append("wait"))
        watch = CudaStopwatch(CPU)
        assert watch._flushed.numel() > Properties.L2_cache_size
        watch.flush()
        for _ in range(2):
            watch.record(lambda: log.append("call"))
        assert watch.times_ms() == [1.0, 1.0]
        assert log == ["event 1", "call", "event 2", "event 3", "call", "event 4", "wait"]


class TestOrder:
    def test_every_repetition_runs_each_variant_once(self) -> None:
        calls: list[int] = []
        variants = [Variant(str(index), lambda index=index: calls.append(index)) for index in range(3)]
        measure("b", {}, variants, device=CPU, repetitions=20, warmup=0, flush_l2=False, seed=4)
        repetitions = [calls[start : start + 3] for start in range(0, 60, 3)]
        assert all(sorted(turn) == [0, 1, 2] for turn in repetitions)
        assert repetitions == turns(3, 20, seed=4)

    def test_each_variant_follows_each_other_one(self) -> None:
        order = [index for turn in turns(3, 20) for index in turn]
        assert set(pairwise(order)) >= {(a, b) for a in range(3) for b in range(3) if a != b}

    def test_a_drifting_clock_reaches_all_alike(self, clock: Clock) -> None:
        """Each call is slower than the one before: in blocks, the last variant would be three times the first."""
        slowness = iter(range(1, 1000))
        variants = [Variant(name, lambda: clock.pass_ms(next(slowness))) for name in "abc"]
        rows = measure("b", {}, variants, device=CPU, repetitions=40, warmup=0, flush_l2=False)
        times = [row.ms for row in rows if row.ms is not None]
        assert max(times) < 1.1 * min(times)

    def test_rows_keep_the_order_of_the_variants(self, clock: Clock) -> None:
        variants = [Variant("z", taking(clock, *[3] * 9)), Variant("a", taking(clock, *[7] * 9))]
        rows = measure("b", {}, variants, device=CPU, repetitions=9, warmup=0)
        assert [(row.variant, round(row.ms or 0)) for row in rows] == [("z", 3), ("a", 7)]


class TestFailures:
    @pytest.mark.parametrize("good_calls", [0, 2, 4])
    def test_a_variant_that_raises_fails_the_run(self, good_calls: int) -> None:
        """In the first call, in the warm-up, and while it is timed."""
        calls = iter(range(good_calls))

        def run() -> None:
            if next(calls, None) is None:
                raise MemoryError("out of memory")

        variants = [Variant("good", lambda: None), Variant("bad", run)]
        with pytest.raises(VariantFailed, match=r"gemm \(tokens 8\): bad failed: out of memory") as caught:
            measure("gemm", {"tokens": 8}, variants, device=CPU, repetitions=3, warmup=3)
        assert isinstance(caught.value.__cause__, MemoryError)

    def test_an_unavailable_variant_is_listed_with_its_reason(self) -> None:
        variants = [Variant("here", lambda: None), Variant.missing("there", "needs sm_90")]
        rows = measure("b", {}, variants, device=CPU, repetitions=2)
        assert (rows[1].variant, rows[1].ms, rows[1].repetitions) == ("there", None, 0)
        (line,) = [line for line in table_of(rows).splitlines() if "there" in line]
        assert "needs sm_90" in line

    @pytest.mark.parametrize(("run", "reason"), [(None, None), (None, ""), (lambda: None, "busy")])
    def test_a_variant_either_runs_or_says_why_not(self, run: Any, reason: str | None) -> None:
        with pytest.raises(ValueError, match="variant 'a' needs either something to run or a reason"):
            Variant("a", run, unavailable=reason)

    def test_two_variants_of_one_name_are_refused(self) -> None:
        with pytest.raises(ValueError, match="different names"):
            measure("b", {}, [Variant("a", lambda: None)] * 2, device=CPU)

    def test_no_repetition_is_refused(self) -> None:
        with pytest.raises(ValueError, match="at least 1, got 0"):
            measure("b", {}, [Variant("a", lambda: None)], device=CPU, repetitions=0)


class TestReport:
    def rows(self, benchmark: str = "b", **case: object) -> list[Row]:
        variants = [Variant("a", lambda: None, extra={"relative_error": 0.125}), Variant.missing("x", "no GPU")]
        return measure(benchmark, case, variants, device=CPU, repetitions=1)

    def test_csv_has_one_header_and_the_same_columns_for_every_benchmark(self, tmp_path: Path) -> None:
        path = tmp_path / "new folder" / "rows.csv"
        write_csv(path, self.rows("first", tokens=8, k=16))
        write_csv(path, self.rows("second"))
        with path.open(newline="") as file:
            lines = list(csv.reader(file))
        assert tuple(lines[0]) == COLUMNS
        assert [line[0] for line in lines] == ["benchmark", "first", "first", "second", "second"]
        assert {len(line) for line in lines} == {len(COLUMNS)}
        first, missing = (dict(zip(COLUMNS, line, strict=True)) for line in lines[1:3])
        assert json.loads(first["case"]) == {"tokens": 8, "k": 16}
        assert json.loads(first["extra"]) == {"relative_error": 0.125}
        assert float(first["ms"]) >= 0
        assert (missing["ms"], missing["unavailable"]) == ("", "no GPU")

    def test_the_columns(self) -> None:
        """Files of different days are put together: a change here is a change for their readers."""
        assert ",".join(COLUMNS) == (
            "benchmark,case,variant,ms,ms_p20,ms_p80,repetitions,gb_s,tflop_s,extra,unavailable,"
            "gpu,driver,torch,triton,cuda,vllm,vllm_omni,vllm_h3_quant"
        )

    def test_a_file_with_other_columns_is_refused_and_kept(self, tmp_path: Path) -> None:
        path = tmp_path / "other.csv"
        path.write_text("name,value\n")
        with pytest.raises(ValueError, match="has the columns name, value; give a new file"):
            write_csv(path, self.rows())
        assert path.read_text() == "name,value\n"

    def test_table_tells_the_cases_apart(self) -> None:
        text = table_of([*self.rows(tokens=8, tp=1), *self.rows(tokens=16, tp=1)])
        assert "b, tp 1" in text.splitlines()[0], "shared fields stand in the title"
        cells = [[cell.strip() for cell in line.split("│")[1:3]] for line in text.splitlines() if line.startswith("│")]
        assert cells == [["8", "a"], ["8", "x"], ["16", "a"], ["16", "x"]]
        assert "relative error" in text
        assert text.count("gpu cpu, torch") == 1

    def test_versions(self, monkeypatch: pytest.MonkeyPatch) -> None:
        where = self.rows()[0].environment
        assert (where.gpu, where.driver) == ("cpu", None)
        assert (where.torch, where.vllm_h3_quant) == (torch.__version__, __version__)
        for version in (where.triton, where.vllm, where.vllm_omni):
            assert version is not None
            assert version[0].isdigit()
        assert bench_report._version("no-such-distribution") is None
        monkeypatch.setenv("PATH", "")
        bench_report._driver.cache_clear()
        assert bench_report._driver() is None
        bench_report._driver.cache_clear()


def test_a_copy_counts_the_bytes_read_and_written(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    assert copy_variant(CPU, 1000).bytes == 2000
    real = torch.Tensor.copy_

    def copy(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        clock.pass_ms(2)
        return real(target, source)

    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    (row,) = measure("copy", {}, [copy_variant(CPU, 10**6)], device=CPU, repetitions=3)
    assert row.gb_s == pytest.approx(1.0), "2 MB in 2 ms"
