"""Loads a pipeline, offloads it as the engine's runner does and runs steps of its DiT, in a process of its own.

    python step_once.py REQUEST.json RESULT.json

The request holds ``model``, ``quantization`` and ``fields`` of ``OmniDiffusionConfig``; about how many ``tokens`` the
clip has; of how many steps its ``schedule`` is and how many ``steps`` of it are run. Of ranks that share a sequence
each also gets its ``rank``, their number ``ulysses`` and a ``port``. The text encoder is left out.
"""

from __future__ import annotations

import gc
import hashlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from harness.denoise import denoise, denoise_inputs, in_runner, largest_clip, offload
from harness.report import environment
from load_once import HostMemory, device_memory, engine, grown, status

from vllm_h3_quant.dlo import pages
from vllm_h3_quant.dlo.adaln import HostedAdaln

COMPONENTS = {"transformer": True, "vae": True, "text_encoder": False, "vae_encoder": True}

T = TypeVar("T")


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Seconds, bytes of device and host, and a digest of the outputs.

    ``load_s`` is the engine's load, ``offload_s`` what its runner then does for an offload. The device is ``rest`` when
    that is over and ``others`` are its bytes outside the DiT. ``anonymous`` and ``shared`` of the host are peaks up to
    then, ``held`` what :mod:`vllm_h3_quant.dlo` keeps. ``steps_s`` are calls of the DiT one by one.
    """
    rank, ulysses = request.get("rank", 0), request.get("ulysses", 1)
    with engine(rank=rank, ulysses=ulysses, port=request.get("port")) as device:
        before = status()
        with HostMemory() as host:
            pipeline, load_s, load_peak = timed(device, partial(_load, request, rank, ulysses, device))
            gc.collect()
            loaded = device_memory(device)["final"]
            backend, offload_s, _ = timed(device, partial(offload, pipeline, device))
        gc.collect()
        at_rest = device_memory(device)
        found = {
            "load_s": load_s,
            "offload_s": offload_s,
            "device": {
                "load_peak": load_peak,
                "loaded": loaded,
                "rest": at_rest["final"],
                "others": _others(pipeline, device),
                "pinned": at_rest["pinned"],
            },
            "host": {"peak": host.peaks(), "rest": grown(before, status()), "held": asdict(pages.held())},
            **_steps(pipeline, request, device),
            "environment": asdict(environment(device)),
        }
        del pipeline, backend
        gc.collect()
    return found


def timed(device: torch.device, call: Callable[[], T]) -> tuple[T, float, int | None]:
    """What ``call`` returns, its seconds, and the most bytes that the device held; None on a CPU."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    result = call()
    if on_gpu:
        torch.cuda.synchronize(device)
    return result, time.perf_counter() - start, device_memory(device)["peak"]


class WatchedDit:
    """Stands for a DiT in the engine's loop over steps.

    Attributes:
        seconds: of each call.
        peaks: bytes of the device in each call; None on a CPU.
        digest: of the outputs, video and then audio, of all calls.
        passes: seconds of AdaLN for a schedule, where it runs from host memory; the first is no part of the first call.
    """

    def __init__(self, dit: Any, device: torch.device) -> None:
        self._dit = dit
        self._device = device
        self._timesteps: torch.Tensor | None = None
        self.seconds: list[float] = []
        self.peaks: list[int | None] = []
        self.passes: list[float] = []
        self.digest = hashlib.sha256()

    def __call__(self, **inputs: Any) -> Any:
        if self._timesteps is None:
            self._timesteps = inputs["unique_timesteps"]
            self.prepare_adaln()
        outputs, seconds, peak = timed(self._device, partial(self._dit, **inputs))
        self.seconds.append(seconds)
        self.peaks.append(peak)
        for output in outputs:
            self.digest.update(output.cpu().contiguous().view(torch.uint8).numpy())
        return outputs

    def prepare_adaln(self) -> None:
        """Have AdaLN's outputs ready for the step that was run first, as a call for it would."""
        cache = self._dit.adaln_cache
        if isinstance(cache, HostedAdaln):
            embedding = self._dit.time_embedder(self._timesteps)
            _, seconds, _ = timed(self._device, lambda: cache.prepare(embedding))
            self.passes.append(seconds)


def _load(request: dict[str, Any], rank: int, ulysses: int, device: torch.device) -> Any:
    from harness.engine import load_pipeline

    fields = {
        "num_gpus": ulysses,
        "parallel_config": {"ulysses_degree": ulysses, "sequence_parallel_size": ulysses},
        "model_loaded": COMPONENTS,
        "pin_cpu_memory": device.type == "cuda",
        **request["fields"],
    }
    return load_pipeline(Path(request["model"]), request["quantization"], rank=rank, **fields)


def _others(pipeline: Any, device: torch.device) -> int | None:
    """Bytes on a GPU of the parameters and buffers outside the DiT."""
    if device.type != "cuda":
        return None
    inside = {id(tensor) for tensor in (*pipeline.transformer.parameters(), *pipeline.transformer.buffers())}
    outside = (tensor for tensor in (*pipeline.parameters(), *pipeline.buffers()) if id(tensor) not in inside)
    storages = [tensor.untyped_storage() for tensor in outside if tensor.device == device]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _steps(pipeline: Any, request: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The first steps of a request, and once more what a second request of its schedule begins with."""
    prepare = partial(denoise_inputs, pipeline, largest_clip(request["tokens"]), schedule=request["schedule"])
    dit = WatchedDit(pipeline.transformer, device)
    inputs = prepare()
    denoise(pipeline, inputs, dit, steps=request["steps"], device=device)
    prepare()
    with in_runner(pipeline, device):
        dit.prepare_adaln()
    cache = pipeline.transformer.adaln_cache
    return {
        "tokens": inputs["branch"].seq_len,
        "steps_s": dit.seconds,
        "step_peak": dit.peaks,
        "adaln_s": dit.passes,
        "adaln_passes": cache.passes if isinstance(cache, HostedAdaln) else None,
        "digest": dit.digest.hexdigest(),
    }


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(measure(json.loads(Path(sys.argv[1]).read_text()))))
