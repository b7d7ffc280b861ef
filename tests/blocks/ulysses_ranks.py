"""One rank of Ulysses: a block with and without fusion over this rank's tokens; prints edges and whether bytes agree.

python ulysses_ranks.py RANK RANKS PORT
"""

from __future__ import annotations

import sys
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


def main(rank: int, ranks: int, port: int) -> None:
    from vllm_omni.platforms import current_omni_platform

    plugin.register()
    device = current_omni_platform.get_torch_device(rank)
    with process_groups(rank=rank, ulysses=ranks, port=port), torch.inference_mode():
        bind_engine_kernels()
        for method in METHODS:
            compare(method, device, rank, ranks)


def compare(method: dict[str, Any], device: torch.device, rank: int, ranks: int) -> None:
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
    print("edges", *(obstacle or "fused" for obstacle in obstacles(fused).values()), sep="|")
    print("same", same, bool((one - x[mine]).abs().max() > 0), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
