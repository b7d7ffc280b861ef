"""Writes a LoRA as PEFT saves it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK = 4
# alpha / rank is a power of two, so that folding it into B in bf16 is exact.
ALPHA = 8
SCALING = ALPHA / RANK


def write_adapter(folder: Path, shapes: Mapping[str, tuple[int, int]], *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Write an adapter with random bf16 matrices for the modules of ``shapes``.

    A and B have unit gain: ``B A x`` is as large as ``x``.

    Args:
        folder: where ``adapter_config.json`` and ``adapter_model.safetensors`` go.
        shapes: ``(N, K)`` of each module by its name inside the DiT.
        seed: the only source of randomness.

    Returns:
        ``NAME.lora_A.weight`` of shape ``(RANK, K)`` and ``NAME.lora_B.weight`` of shape ``(N, RANK)``.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * columns**-0.5).bfloat16()

    tensors = {}
    for name, (outputs, inputs) in shapes.items():
        tensors[f"{name}.lora_A.weight"] = normal(RANK, inputs)
        tensors[f"{name}.lora_B.weight"] = normal(outputs, RANK)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({f"base_model.model.{name}": t for name, t in tensors.items()}, folder / "adapter_model.safetensors")
    targets = sorted({name.rpartition(".")[2] for name in shapes})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return tensors
