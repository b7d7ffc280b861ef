"""AdaLN's outputs for compiled blocks, which cannot look into a table of Python's."""

from __future__ import annotations

import itertools
import weakref
from typing import Any, Protocol

import torch


class Table(Protocol):
    """What has the outputs."""

    def output_of(self, index: int) -> torch.Tensor: ...


_tables: weakref.WeakValueDictionary[int, Table] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def register(table: Table) -> int:
    """A number by which :func:`output` finds the table while it lives."""
    number = next(_numbers)
    _tables[number] = table
    return number


def mark(linear: Any, index: int, width: int) -> None:
    """Tell a projection's linear its place among all projections and the width of its output over all ranks.

    The place is a tensor, and so an input of the graph that blocks share. A number would be a constant of it, and each
    block would be compiled by itself, as many as the compiler allows; the others would run uncompiled.
    """
    linear.h3_quant_place = torch.tensor(index, device="cpu")
    linear.h3_quant_width = width


def marked(module: Any) -> tuple[torch.Tensor, int] | None:
    """What :func:`mark` told a linear, or the one inside of an adapter; None where it told nothing."""
    linear = getattr(module, "base_layer", module)
    place = getattr(linear, "h3_quant_place", None)
    return None if place is None else (place, linear.h3_quant_width)


@torch.library.custom_op("h3_quant::hosted_adaln", mutates_args=())
def output(embedding: torch.Tensor, table: int, place: torch.Tensor, width: int) -> torch.Tensor:
    """A copy of the ``(M, width)`` output of one projection for the embeddings that were prepared.

    A copy, because a compiled block may write over what an operator returned.

    Args:
        embedding: ``(M, E)``; it ties the call to its step.
        table: number of the table.
        place: ``()`` int64 on the host, of the projection among all of the DiT.
        width: of its output.
    """
    return _tables[table].output_of(int(place)).clone()


@output.register_fake
def _(embedding: torch.Tensor, table: int, place: torch.Tensor, width: int) -> torch.Tensor:
    return embedding.new_empty(embedding.shape[0], width, dtype=torch.bfloat16)
