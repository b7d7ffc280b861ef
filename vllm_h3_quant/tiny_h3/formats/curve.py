"""A checkpoint pruned to a curve: AdaLN inputs over a grid of timesteps replace the time embedder."""

from __future__ import annotations

import math

import torch
from torch.nn.functional import linear, silu

GRID, RANK = 1025, 8
TABLE = "adaln_t_table"
_ADALN = ".adaln_proj.linear.weight"

State = dict[str, torch.Tensor]


def prune(state: State, *, broken: bool = False) -> State:
    """``state`` with the time embedder folded into a table of rank 8.

    ``G = silu(time_embedder(t))`` over ``t = k / 1024`` is ``U S V^T``; the table is ``G V8`` and each AdaLN weight
    ``W V8``, so that ``table @ (W V8)^T`` is ``G W^T`` up to what eight directions leave out of ``G``.

    Args:
        state: native tensors.
        broken: a random table of the same size and norm instead.
    """
    activations = _activations(state)
    directions = torch.linalg.svd(activations, full_matrices=False).Vh[:RANK].t()
    table = activations @ directions
    if broken:
        noise = torch.randn(GRID, RANK, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        table = noise * (table.norm() / noise.norm())
    pruned = {name: tensor for name, tensor in state.items() if not name.startswith("time_embedder.")}
    for name, weight in state.items():
        if name.endswith(_ADALN):
            pruned[name] = (weight.double() @ directions).to(weight.dtype)
    return pruned | {TABLE: table.float().contiguous()}


def _activations(state: State) -> torch.Tensor:
    """``(1025, time_embed_dim)`` fp64, the formula of vLLM-Omni's ``MiniMaxH3TimeEmbedder``; t is 1 - sigma."""

    def layer(name: str, x: torch.Tensor) -> torch.Tensor:
        return linear(x, state[f"time_embedder.{name}.weight"].double(), state[f"time_embedder.{name}.bias"].double())

    half = state["time_embedder.proj_in.weight"].shape[1] // 2
    frequencies = torch.exp(-math.log(10000.0) * torch.arange(half, dtype=torch.float64) / half)
    angles = torch.linspace(0, 1, GRID, dtype=torch.float64)[:, None] * frequencies
    return silu(layer("proj_out", silu(layer("proj_in", torch.cat((angles.cos(), angles.sin()), 1)))))
