"""Run requests on two ranks in each way to hold the weights, and save each rank's latents and host memory."""

from __future__ import annotations

import gc
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from harness.denoise import Clip, denoise, denoise_inputs, offload
from harness.engine import free_port, load_pipeline, process_groups

from vllm_h3_quant.dlo import pages, sharing

STEPS = 2
CLIP = Clip(64, 64, 39)
COMPONENTS = {"transformer": True, "vae": True, "text_encoder": False, "vae_encoder": True}
SPLITS: dict[str, dict[str, Any]] = {
    "ulysses": {"ulysses_degree": 2},
    "tensor_parallel": {"tensor_parallel_size": 2},
    "hsdp": {"use_hsdp": True, "hsdp_shard_size": 2},
}


def serve(rank: int, out: Path, runs: dict[str, dict[str, Any]]) -> None:
    """One of two ranks. Writes ``OUT/NAME.rankR.pt``: ``latents`` of two requests and ``held``, in bytes by kind.

    Args:
        rank: 0 or 1.
        out: a folder.
        runs: by name a ``model``'s root, its ``config``, further ``fields`` of the engine, and ``split``, a key of
            :data:`SPLITS`.
    """
    torch.set_num_threads(1)
    sharing.SMALLEST = 4096  # a block of the tiny model is smaller than what is worth sharing
    found: dict[str, list[tuple[str, Any]]] = {split: [] for split in SPLITS}
    for name, run in runs.items():
        found[run["split"]].append((name, run))
    for split, group in found.items():
        with process_groups(rank=rank, port=port_of(split, rank, out), **{split: 2}):
            for name, run in group:
                torch.save(serve_one(rank, run), out / f"{name}.rank{rank}.pt")
                gc.collect()
                torch.distributed.barrier()


def port_of(split: str, rank: int, out: Path) -> int:
    """A port that the first rank found free just now."""
    file = out / f"{split}.port"
    if rank == 0:
        fresh = file.with_suffix(".fresh")
        fresh.write_text(str(free_port()))
        fresh.rename(file)
    deadline = time.monotonic() + 120
    while not file.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the first rank has not come to {split}")
        time.sleep(0.05)
    return int(file.read_text())


def serve_one(rank: int, run: dict[str, Any]) -> dict[str, Any]:
    from vllm_omni.platforms import current_omni_platform

    device = current_omni_platform.get_torch_device(rank)
    pipeline = load_pipeline(
        Path(run["model"]),
        run["config"],
        rank=rank,
        num_gpus=2,
        parallel_config=SPLITS[run["split"]],
        pin_cpu_memory=device.type == "cuda",
        model_loaded=COMPONENTS,
        **run["fields"],
    )
    backend = offload(pipeline, device)
    latents = []
    for _ in range(2):
        inputs = denoise_inputs(pipeline, CLIP, schedule=STEPS)
        found = denoise(pipeline, inputs, pipeline.transformer, steps=STEPS, device=device)
        latents.append([tensor.cpu() for tensor in found])
    torch.distributed.barrier()  # no rank lets go of what another has yet to map
    result = {"latents": latents, "held": asdict(pages.held())}
    if backend is not None:
        backend.shutdown()
    return result
