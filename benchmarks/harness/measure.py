"""Times variants of one operation side by side: what runs, how long, on what.

A repetition runs every variant once, in an order drawn anew, so that a clock that drifts or a chip that
heats up reaches all variants alike. Times are medians of CUDA events, or of the host's clock where the
device is the CPU; the row then says ``cpu`` for the GPU.

Before each timed call a buffer larger than the L2 cache is written. That is not part of the time. It
makes small cases start cold, as in a model, and keeps the GPU busy while the host launches the call, so
that the launch is not part of the time either.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from harness.report import Row, environment, phrase


@dataclass(frozen=True)
class Variant:
    """One way to do the operation, or the reason why it cannot be done here.

    Attributes:
        name: unique within a measurement.
        run: one call. What it returns is dropped at once: the outputs of long sequences do not fit twice.
        flops: floating-point or integer operations of a call, for TFLOP/s.
        bytes: bytes that a call must read and write, for GB/s.
        extra: further columns, such as a relative error.
        unavailable: why there is no ``run``.
    """

    name: str
    run: Callable[[], object] | None
    flops: float | None = None
    bytes: float | None = None
    extra: Mapping[str, object] = field(default_factory=dict)
    unavailable: str | None = None

    def __post_init__(self) -> None:
        if (self.run is None) is not bool(self.unavailable):
            raise ValueError(f"variant {self.name!r} needs either something to run or a reason why not")

    @classmethod
    def missing(cls, name: str, reason: str) -> Variant:
        """A variant that is listed with ``reason`` in place of times."""
        return cls(name, None, unavailable=reason)


class VariantFailed(RuntimeError):
    """A variant raised while it was measured; the cause is chained."""


class Stopwatch(Protocol):
    """Times calls on a device without waiting for each."""

    def flush(self) -> None:
        """Write more bytes than the last-level cache holds."""

    def record(self, run: Callable[[], object]) -> None:
        """Make one timed call."""

    def wait(self) -> None:
        """Return when the device has nothing left to do."""

    def times_ms(self) -> list[float]:
        """Milliseconds of each recorded call, in their order."""


class HostStopwatch:
    """The host's clock around calls that are done when they return."""

    def __init__(self, cache_bytes: int = 2**26) -> None:
        self._flushed = torch.empty(cache_bytes, dtype=torch.uint8)
        self._times: list[float] = []

    def flush(self) -> None:
        self._flushed.zero_()

    def record(self, run: Callable[[], object]) -> None:
        start = time.perf_counter()
        output = run()
        self._times.append((time.perf_counter() - start) * 1e3)
        del output

    def wait(self) -> None:
        pass

    def times_ms(self) -> list[float]:
        return self._times


class CudaStopwatch:
    """CUDA events on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        l2 = torch.cuda.get_device_properties(device).L2_cache_size
        self._flushed = torch.empty(2 * l2, dtype=torch.uint8, device=device)
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def flush(self) -> None:
        self._flushed.zero_()

    def record(self, run: Callable[[], object]) -> None:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        output = run()
        end.record()
        del output
        self._events.append((start, end))

    def wait(self) -> None:
        torch.cuda.synchronize(self._device)

    def times_ms(self) -> list[float]:
        self.wait()
        return [start.elapsed_time(end) for start, end in self._events]


def stopwatch(device: torch.device) -> Stopwatch:
    """The stopwatch of a device."""
    return CudaStopwatch(device) if device.type == "cuda" else HostStopwatch()


def turns(variants: int, repetitions: int, seed: int = 0) -> list[list[int]]:
    """The order of the variants in each repetition: shuffled, so that no variant always follows the same other."""
    rng = random.Random(seed)
    return [rng.sample(range(variants), variants) for _ in range(repetitions)]


def measure(
    benchmark: str,
    case: Mapping[str, object],
    variants: Sequence[Variant],
    *,
    device: torch.device,
    repetitions: int = 20,
    warmup: int = 3,
    flush_l2: bool = True,
    seed: int = 0,
) -> list[Row]:
    """Time the variants interleaved; one row each, in their order.

    Args:
        benchmark: name of the benchmark.
        case: shape fields and whatever else tells this measurement from the others.
        variants: what to compare.
        device: where they run.
        repetitions: timed calls of each variant.
        warmup: untimed calls of each variant before the first timed one.
        flush_l2: write a buffer larger than the L2 cache before each timed call.
        seed: of the order.

    Raises:
        ValueError: two variants share a name, or nothing would be timed.
        VariantFailed: a variant raised. Nothing is reported for the others.
    """
    names = [variant.name for variant in variants]
    if len(set(names)) < len(names):
        raise ValueError(f"{benchmark}: variants must have different names, got {names}")
    if repetitions < 1:
        raise ValueError(f"{benchmark}: repetitions must be at least 1, got {repetitions}")
    ready = [(variant.name, variant.run) for variant in variants if variant.run is not None]
    watch = stopwatch(device)
    for name, run in ready:
        with _failures_named(benchmark, case, name):
            for _ in range(warmup):
                run()
            watch.wait()
    sequence = [ready[index] for turn in turns(len(ready), repetitions, seed) for index in turn]
    for name, run in sequence:
        if flush_l2:
            watch.flush()
        with _failures_named(benchmark, case, name):
            watch.record(run)
    samples: dict[str, list[float]] = {}
    for (name, _), ms in zip(sequence, watch.times_ms(), strict=True):
        samples.setdefault(name, []).append(ms)
    return [_row(benchmark, case, variant, samples.get(variant.name, []), device) for variant in variants]


def copy_variant(device: torch.device, nbytes: int | None = None) -> Variant:
    """A copy within the device's memory: what a kernel that only moves bytes can reach.

    Args:
        device: where both buffers lie.
        nbytes: size of a buffer; 2 GiB on a GPU and 64 MiB on a CPU when None. A call reads and writes it.
    """
    size = nbytes or (2**31 if device.type == "cuda" else 2**26)
    source = torch.randint(2**31, (size // 4,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    return Variant("device copy", lambda: target.copy_(source), bytes=2 * source.nbytes)


@contextlib.contextmanager
def _failures_named(benchmark: str, case: Mapping[str, object], variant: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise VariantFailed(f"{benchmark} ({phrase(case)}): {variant} failed: {error}") from error


def _row(benchmark: str, case: Mapping[str, object], variant: Variant, times: list[float], device: torch.device) -> Row:
    low, median, high = (float(t) for t in np.percentile(times, (20, 50, 80))) if times else (None, None, None)
    return Row(
        benchmark=benchmark,
        case=case,
        variant=variant.name,
        ms=median,
        ms_p20=low,
        ms_p80=high,
        repetitions=len(times),
        gb_s=variant.bytes / median / 1e6 if variant.bytes and median else None,
        tflop_s=variant.flops / median / 1e9 if variant.flops and median else None,
        extra=variant.extra,
        unavailable=variant.unavailable,
        environment=environment(device),
    )
