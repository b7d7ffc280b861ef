"""Lets MiniMax-H3's DiT run on a curve over timesteps, which a pruned checkpoint has in place of the time embedder.

Why: vLLM-Omni builds a time embedder whatever the checkpoint holds, and its AdaLN projections apply SiLU, which a
curve's points have behind them already.
Symbols, vLLM-Omni 0.30.0, in ``vllm_omni.diffusion.models.minimax_h3.minimax_h3_transformer``:
``MiniMaxH3DiTModel.time_embedder`` is replaced; ``_embed`` calls it once a forward with ``t`` in [0, 1]
(``denoise_loop.py``: ``1 - sigma``, or the timestep of a condition, at most 1), and ``load_weights`` finds its buffer
among ``named_buffers``, as it does ``rope.inv_freq``. ``MiniMaxH3AdalnProj.forward`` is written out again without its
SiLU, in a subclass that the projections of one model become: other models keep the class, compilation traces one more
``forward``, and the cache of projections (``_adaln_cache``, ``_cache_name``) is asked as before, by a key that holds
the curve's point and the weight. ``arch.time_embed_dim`` is read.
The start-up sidecar of that cache (``minimax_h3_adaln_cache_path``) is not concerned: it is bound to the architecture
and to digests of AdaLN's weights, so that one of the full model is rejected, and a pruned model has none.
When they move: compare ``MiniMaxH3AdalnProj.forward`` with the one here, and check what else reads
``time_embedder``, whose other names are in ``MINIMAX_H3_FP32_PARAM_NAMES`` and ``_hsdp_ignored_modules``.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn

from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.upstream.preflight import Symbol

_TRANSFORMER = "vllm_omni.diffusion.models.minimax_h3.minimax_h3_transformer"
SYMBOLS = (
    Symbol("vllm-omni", _TRANSFORMER, "MiniMaxH3TimeEmbedder.forward", ("self", "t")),
    Symbol("vllm-omni", _TRANSFORMER, "MiniMaxH3AdalnProj.forward", ("self", "t_emb")),
    Symbol("vllm-omni", _TRANSFORMER, "MiniMaxH3DiTModel.load_weights", ("self", "weights")),
    Symbol(
        "vllm-omni",
        "vllm_omni.diffusion.models.minimax_h3.adaln_cache",
        "MiniMaxH3RuntimeAdalnCache.project",
        ("name", "module", "embedding", "compute"),
    ),
)

TABLE = "time_embedder.table"
"""The name of the curve in a model that serves one."""


class Curve(nn.Module):
    """AdaLN's input by a timestep, linear between the rows of a table that are spread evenly over [0, 1].

    Attributes:
        table: ``(grid, width)`` fp32; NaN until it is read, so that no clip comes out of one that never was.
    """

    table: torch.Tensor

    def __init__(self, grid: int, width: int, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("table", torch.full((grid, width), torch.nan, dtype=torch.float32, device=device))

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        """``(timesteps,)`` to ``(timesteps, width)`` fp32; a timestep outside of [0, 1] is the nearest in it."""
        last = self.table.shape[0] - 1
        position = t.to(torch.float32).clamp(0, 1) * last
        left = position.floor().clamp(max=last - 1).long()
        return torch.lerp(self.table[left], self.table[left + 1], (position - left)[:, None])


def serve_curve(transformer: Any, grid: int, width: int) -> None:
    """Make one ``MiniMaxH3DiTModel`` run on a curve, before its weights are read.

    It then takes the curve as :data:`TABLE`, and ``m = linear(c.to(bf16))`` in every AdaLN projection. Nothing else of
    it changes, nor any other model.

    Args:
        transformer: the model, on any device.
        grid: rows of the table, at least 2.
        width: its columns.

    Raises:
        H3QuantError: the model was built for another width of AdaLN's input.
    """
    from vllm_omni.diffusion.models.minimax_h3.minimax_h3_transformer import MiniMaxH3AdalnProj

    built = transformer.arch.time_embed_dim
    if built != width:
        root = transformer.od_config.model or "ROOT"
        raise H3QuantError(
            f"{root}/transformer/config.json: time_embed_dim={built}, but the checkpoint's curve has {width} columns;"
            f" set time_embed_dim to {width} there"
        )
    device = next(transformer.time_embedder.parameters()).device
    transformer.time_embedder = Curve(grid, width, device)
    for module in transformer.modules():
        if isinstance(module, MiniMaxH3AdalnProj):
            module.__class__ = _curve_projection()


@cache
def _curve_projection() -> Any:
    from vllm_omni.diffusion.models.minimax_h3.minimax_h3_transformer import MiniMaxH3AdalnProj

    class CurveAdalnProj(MiniMaxH3AdalnProj):
        def forward(self, t_emb: torch.Tensor) -> tuple[torch.Tensor, ...]:
            def project() -> torch.Tensor:
                out: torch.Tensor = self.linear(t_emb.to(torch.bfloat16))[0]
                return out

            held = self._adaln_cache
            x = project() if held is None else held.project(self._cache_name, self.linear, t_emb, project)
            x = x.view(x.shape[0] * self.modality_num, self.expand_ratio * self.hidden_size)
            return x.chunk(self.expand_ratio, dim=-1)

    return CurveAdalnProj
