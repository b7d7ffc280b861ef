"""What every format of a checkpoint says of itself: how it is told, named, laid out and decoded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeGuard

import torch

from vllm_h3_quant.config.components import TRANSFORMER
from vllm_h3_quant.loader.architecture import Architecture
from vllm_h3_quant.loader.checkpoint import Checkpoint
from vllm_h3_quant.loader.coding import Coding
from vllm_h3_quant.loader.formats.beside import WEIGHT, Beside, Found, only_values, split
from vllm_h3_quant.loader.header import Entry
from vllm_h3_quant.loader.stored import Segment

PREFIXES = ("model.diffusion_model.", "diffusion_model.")
"""What a file that holds a whole pipeline, or could, has before the DiT's names."""


@dataclass(frozen=True)
class Target:
    """Where a file's module goes.

    Attributes:
        module: the model's module.
        part: which of its rows: empty for all, or ``q``, ``k``, ``v``, ``gate`` or ``up``.
    """

    module: str
    part: str = ""


@dataclass(frozen=True)
class Signs:
    """What a format is told by. No tensor is read for it.

    Attributes:
        names: of all tensors.
        bare: entries by their names without :data:`PREFIXES`.
        kinds: of companions of weights (:mod:`vllm_h3_quant.loader.formats.beside`) that there are.
        dtypes: of weights, norms included.
        metadata: of the files.
        config: ``config.json`` beside them.
    """

    names: Collection[str]
    bare: Mapping[str, Entry]
    kinds: frozenset[str]
    dtypes: frozenset[str]
    metadata: Mapping[str, str]
    config: Mapping[str, Any]


@dataclass(frozen=True)
class Layout(ABC):
    """How a file names its modules, and in which order it has the rows of a fused weight.

    Attributes:
        value: its order of rows, as ``check`` prints it.
    """

    value: str
    component: ClassVar[str] = TRANSFORMER
    """The component that it is of."""
    fused: ClassVar[bool] = True
    """Whether q, k and v are one tensor."""
    named: ClassVar[str] = "MiniMax-H3"
    """Whose names they are, for errors."""

    unread: ClassVar[Collection[str]] = ()
    """Tensors that the engine never reads."""

    @abstractmethod
    def has(self, signs: Signs) -> bool:
        """Whether a file has this layout by its names and marks."""

    @abstractmethod
    def target(self, module: str) -> Target | None:
        """Where a module of the file goes, which is named without a prefix; None where the model has none."""

    def bare(self, name: str) -> str:
        """``name`` without what stands before the component's own names."""
        return without_prefix(name)

    def runs(self, module: str, rows: int, architecture: Architecture | None) -> list[tuple[int, int]]:
        """The rows of a whole weight in the model's order: first row and number of neighbours in the file.

        Args:
            module: the model's.
            rows: of the weight.
            architecture: sizes of the DiT.
        """
        return [(0, rows)]

    def segments(
        self, module: str, entry: Entry, coding: Coding, architecture: Architecture | None
    ) -> tuple[Segment, ...]:
        """The rows of a whole weight in the model's order.

        Raises:
            H3QuantError: the coding cannot follow them.
        """
        return tuple(
            Segment(entry, coding, first, count) for first, count in self.runs(module, entry.shape[0], architecture)
        )

    def reordered(self, module: str, values: torch.Tensor, architecture: Architecture | None) -> torch.Tensor:
        """``values`` of a whole weight, which have the model's order of rows, in that of the file."""
        runs = self.runs(module, values.shape[0], architecture)
        if runs == [(0, values.shape[0])]:
            return values
        found = torch.empty_like(values)
        row = 0
        for first, count in runs:
            found[first : first + count] = values[row : row + count]
            row += count
        return found

    def layer(self, name: str) -> int | None:
        """The block or decoder layer that a tensor belongs to; None outside of them."""
        return None

    def module(self, name: str) -> str:
        """The file's module for a whole linear of the model."""
        return name

    def taken_apart(self, module: str, rows: int, checkpoint: Checkpoint) -> list[tuple[str, int]]:
        """The modules as which the engine takes a whole linear of the file, in order, and the rows of each.

        Raises:
            H3QuantError: the configuration does not say how many rows they have.
        """
        return [(module, rows)]


@dataclass(frozen=True)
class Format(ABC):
    """A public format.

    Attributes:
        layout: names and order of rows.
    """

    layout: Layout
    name: ClassVar[str]
    """What ``check`` prints."""
    quantized: ClassVar[bool] = True
    """Whether its linears hold codes."""
    is_export: ClassVar[bool] = False
    """Whether this package wrote it, so that its codes are those of a method."""
    known: ClassVar[bool] = True
    """Whether it can be read."""
    kinds: ClassVar[Mapping[str, str]] = {}
    """Kinds of companions by the last part of their names, beside those that all know."""
    loose: ClassVar[Collection[str]] = ()
    """Tensors of no module that carry no value."""

    @classmethod
    @abstractmethod
    def told(cls, signs: Signs, layout: Layout | None) -> Format | None:
        """The format of a file, if it is this one.

        Args:
            signs: of the file.
            layout: that its names have; None where it is none that is known.
        """

    def coding_of(self, found: Found, beside: Beside, metadata: Mapping[str, str]) -> Coding:
        """How ``found`` is coded.

        Args:
            found: a weight of two dimensions.
            beside: its companions.
            metadata: of the files.

        Raises:
            H3QuantError: a dtype that the format does not have, codes without a scale, a scale without codes, one of a
                wrong shape, not finite or not positive, or a statement about the codes that cannot be read.
        """
        return only_values(found, beside)


@dataclass(frozen=True)
class Unknown(Format):
    """What no format takes for its own."""

    name = "unknown"
    quantized = False
    known = False

    @classmethod
    def told(cls, signs: Signs, layout: Layout | None) -> Format | None:
        return None


def of_transformer(layout: Layout | None) -> TypeGuard[Layout]:
    """Whether a file is told to be of the DiT by its names."""
    return layout is not None and layout.component == TRANSFORMER


def without_prefix(name: str) -> str:
    """``name`` without the first of :data:`PREFIXES` that it has."""
    return next((name.removeprefix(prefix) for prefix in PREFIXES if name.startswith(prefix)), name)


def signs_of(checkpoint: Checkpoint, kinds: Mapping[str, str]) -> Signs:
    """What tells the format of ``checkpoint``; ``kinds`` are those of all formats."""
    bare = {without_prefix(name): entry for name, entry in checkpoint.entries.items()}
    by_name = {name: split(name, kinds)[1] for name in bare}
    return Signs(
        names=checkpoint.entries.keys(),
        bare=bare,
        kinds=frozenset(by_name.values()),
        dtypes=frozenset(entry.dtype for name, entry in bare.items() if by_name[name] == WEIGHT),
        metadata=checkpoint.metadata,
        config=checkpoint.config,
    )
