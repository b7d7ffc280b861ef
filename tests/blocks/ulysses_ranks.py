"""One rank of Ulysses: a block with and without fusion over this rank's tokens; says edges and whether bytes agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from bench_block import block_inputs
from h3_layers import block, engine_config
from harness.engine import process_groups
from shapes import H3, TINY

from vllm_h3_quant import plugin
from vllm_h3_quant.blocks.edges import obstacles
from vllm_h3_quant.methods.device import bind_engine_kernels

METHODS: tuple[dict[str, Any], ...] = (
    {"method": "h3_fp8", "attention": "fp8"},
    {"method": "h3_int8", "attention": "int8"},
)


def serve(rank: int, ranks: int, port: int, out: Path) -> None:
    """Write two lines for each method into a file of this rank in ``out``."""
    from vllm_omni.platforms import current_omni_platform

    plugin.register()
    device = current_omni_platform.get_torch_device(rank)
    with process_groups(rank=rank, ulysses=ranks, port=port), torch.inference_mode():
        bind_engine_kernels()
        (out / str(rank)).write_text("".join(compare(method, device, rank, ranks) for method in METHODS))


def compare(method: dict[str, Any], device: torch.device, rank: int, ranks: int) -> str:
    on_gpu = device.type == "cuda"
    shape, tokens = (H3, 16384) if on_gpu else (TINY, 64)
    degrees = {"ulysses_degree": ranks, "sequence_parallel_size": ranks}
    fused = block(shape, method, device, **degrees)
    plain = block(shape, {**method, "fuse": False}, device, **degrees)
    x, arguments = block_inputs(shape, tokens, device)
    mine = slice(rank * tokens // ranks, (rank + 1) * tokens // ranks)
    arguments |= {name: arguments[name][mine] for name in ("combined_indices", "rope_table")}
    arguments["packed_total"] = tokens
    with engine_config(None, **degrees):
        one, other = (model(x[mine], **arguments) for model in (fused, plain))
    same = torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    edges = "|".join(("edges", *(obstacle or "fused" for obstacle in obstacles(fused).values())))
    return f"{edges}\nsame {same} {bool((one - x[mine]).abs().max() > 0)}\n"
