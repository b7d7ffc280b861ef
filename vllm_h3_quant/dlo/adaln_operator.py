"""AdaLN's outputs for compiled blocks, which cannot look into a table of Python's."""

from __future__ import annotations

import itertools
import weakref
from typing import Protocol

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


@torch.library.custom_op("h3_quant::hosted_adaln", mutates_args=())
def output(embedding: torch.Tensor, table: int, index: int, width: int) -> torch.Tensor:
    """A copy of the ``(M, width)`` output of the projection ``index`` for the embeddings that were prepared.

    A copy, because a compiled block may write over what an operator returned.

    Args:
        embedding: ``(M, E)``; it ties the call to its step.
        table: number of the table.
        index: place of the projection in the DiT.
        width: of its output.
    """
    return _tables[table].output_of(index).clone()


@output.register_fake
def _(embedding: torch.Tensor, table: int, index: int, width: int) -> torch.Tensor:
    return embedding.new_empty(embedding.shape[0], width, dtype=torch.bfloat16)
