"""Loads a pipeline once, in a process that does nothing else, and tells how long it took and how much memory.

    python load_once.py REQUEST.json RESULT.json

The request holds ``model``, ``quantization`` and ``fields`` of ``OmniDiffusionConfig``.
"""

from __future__ import annotations

import gc
import json
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from harness.report import environment

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
INTERVAL_S = 0.02
IMPORTED = (
    "vllm_omni.diffusion.model_loader.diffusers_loader",
    "vllm_omni.diffusion.models.minimax_h3.pipeline_minimax_h3",
)
"""What a load imports; imported before it, since that takes seconds and memory of its own."""

_KINDS = {"VmRSS": "host", "RssAnon": "anonymous", "RssFile": "file", "RssShmem": "shared"}


class HostMemory:
    """Peaks of this process's resident memory over what it was at the start, sampled by a thread.

    Pages of mapped files are resident while they are touched and can be dropped at any time: they are counted apart
    from anonymous memory, which is what a load takes from the host. The kernel's own maximum of both together misses
    nothing between two samples.
    """

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="host-memory", daemon=True)

    def __enter__(self) -> HostMemory:
        try:
            CLEAR_REFS.write_text("5")  # the kernel's maximum begins anew
            self._reset = True
        except OSError:
            self._reset = False
        self._before = status()
        self._peaks = dict(self._before)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._note()

    def peaks(self) -> dict[str, int | None]:
        """Bytes over the start by kind; None for what this system does not count.

        ``host`` is all of it.
        """
        found = grown(self._before, self._peaks)
        highest = self._peaks.get("VmHWM", 0)
        # Without the reset, a maximum that did not grow is of the time before.
        if self._reset or highest > self._before.get("VmHWM", 0):
            found["host"] = max(found["host"] or 0, highest - self._before.get("VmRSS", highest))
        return found

    def _sample(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            self._note()

    def _note(self) -> None:
        for key, value in status().items():
            self._peaks[key] = max(value, self._peaks.get(key, 0))


def status() -> dict[str, int]:
    """Resident memory of this process in bytes, by the kernel's names."""
    found = {}
    for line in STATUS.read_text().splitlines():
        key, _, value = line.partition(":")
        if key in _KINDS or key == "VmHWM":
            found[key] = int(value.split()[0]) * 1024
    return found


def grown(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int | None]:
    """Bytes between two of :func:`status` by kind; None for what this system does not count."""
    return {name: now[key] - before[key] if key in before else None for key, name in _KINDS.items()}


@contextmanager
def engine(*, rank: int = 0, **ranks: Any) -> Iterator[torch.device]:
    """The engine imported, its groups there, and nothing of a model yet; yields this rank's device.

    Args:
        rank: this process's rank.
        ranks: more of :func:`process_groups`.
    """
    from harness.engine import process_groups
    from vllm_omni.platforms import current_omni_platform

    from vllm_h3_quant import plugin
    from vllm_h3_quant.methods.device import bind_engine_kernels

    plugin.register_general()
    for module in IMPORTED:
        import_module(module)
    device = current_omni_platform.get_torch_device(rank)
    with process_groups(rank=rank, **ranks):
        bind_engine_kernels()
        if device.type == "cuda":
            torch.ones(1, device=device)  # the context is no part of the load
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        gc.collect()
        yield device


def load(request: dict[str, Any]) -> dict[str, Any]:
    """One load: seconds, bytes of device and host.

    ``weights_s`` begins with the first tensor that the engine asks for and ends when the pipeline is loaded, with all
    that is quantized or moved; ``load_s`` also has the construction of the model.
    """
    from harness.engine import load_pipeline

    loaders: list[Any] = []
    with engine() as device:
        with HostMemory() as host:
            start = time.perf_counter()
            pipeline = load_pipeline(
                Path(request["model"]), request["quantization"], watch=loaders.append, **request["fields"]
            )
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            end = time.perf_counter()
        gc.collect()
        found = {
            "weights_s": end - loaders[0].counter_before_loading_weights,
            "load_s": end - start,
            "device": device_memory(device),
            "host": host.peaks(),
            "environment": asdict(environment(device)),
        }
        del pipeline
    return found


def device_memory(device: torch.device) -> dict[str, int | None]:
    """Bytes that PyTorch holds on ``device`` now and held at most, and those of pinned host memory; None on a CPU."""
    if device.type != "cuda":
        return dict.fromkeys(("final", "peak", "reserved", "pinned"))
    return {
        "final": torch.cuda.memory_allocated(device),
        "peak": torch.cuda.max_memory_allocated(device),
        "reserved": torch.cuda.max_memory_reserved(device),
        "pinned": torch.cuda.host_memory_stats().get("allocated_bytes.peak"),
    }


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(load(json.loads(Path(sys.argv[1]).read_text()))))
