"""Load the tiny model on some ranks and save each rank's quantized linears."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from harness.engine import load_pipeline, process_groups
from safetensors.torch import save_file

from vllm_h3_quant.methods.base import H3LinearMethod


def dump(rank: int, out: Path, ranks: int, port: int, loads: dict[str, dict[str, Any]]) -> None:
    """One of some ranks. Writes ``OUT/NAME.rankR.safetensors``; the text encoder is sharded like the DiT.

    Args:
        rank: from 0.
        out: a folder.
        ranks: how many there are.
        port: where they meet.
        loads: by name a ``model``'s root and its ``config``.
    """
    from vllm_omni.diffusion.data import DiffusionParallelConfig

    parallel = DiffusionParallelConfig(tensor_parallel_size=ranks, text_encoder_tp_size=ranks)
    with process_groups(rank=rank, tensor_parallel=ranks, port=port):
        for name, load in loads.items():
            root, config = Path(load["model"]), load["config"]
            pipeline = load_pipeline(root, config, rank=rank, parallel_config=parallel, num_gpus=ranks)
            save_file(shards(pipeline), str(out / f"{name}.rank{rank}.safetensors"))


def shards(pipeline: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Codes as ``(N, K)`` bytes, scales, and how the layer is cut, of every quantized linear."""
    tensors = {}
    for name, module in pipeline.named_modules():
        if isinstance(getattr(module, "quant_method", None), H3LinearMethod):
            tensors[f"{name}.codes"] = module.weight.t().contiguous().view(torch.uint8).cpu()
            tensors[f"{name}.scale"] = module.weight_scale.contiguous().cpu()
            tensors[f"{name}.widths"] = torch.tensor(module.logical_widths)
            tensors[f"{name}.row_parallel"] = torch.tensor(module.input_size_per_partition != module.input_size)
    return tensors
