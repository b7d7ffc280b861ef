"""Pruned to a curve: a table over timesteps replaces the time embedder, in a file of any of the DiT's formats."""

from __future__ import annotations

from vllm_h3_quant.loader.checkpoint import Checkpoint
from vllm_h3_quant.loader.formats.base import Signs, without_prefix
from vllm_h3_quant.loader.header import Entry

CURVE = "adaln_t_table"
"""The table: AdaLN inputs over a grid of timesteps."""


def is_pruned(signs: Signs) -> bool:
    """Whether a file has the table."""
    return CURVE in signs.bare


def table_of(checkpoint: Checkpoint) -> Entry:
    """The table of a checkpoint that is pruned."""
    return next(entry for name, entry in checkpoint.entries.items() if without_prefix(name) == CURVE)
