"""What each parameter of a component is made of, and what is wrong with the checkpoint."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from vllm_h3_quant.config.components import TEXT_ENCODER, TRANSFORMER
from vllm_h3_quant.errors import H3QuantError, nearest
from vllm_h3_quant.loader.architecture import Architecture, Expected
from vllm_h3_quant.loader.checkpoint import Checkpoint
from vllm_h3_quant.loader.coding import Coding
from vllm_h3_quant.loader.formats import Detection, detect, is_loose, split
from vllm_h3_quant.loader.formats.base import Target
from vllm_h3_quant.loader.formats.beside import BIAS, WEIGHT, Found
from vllm_h3_quant.loader.formats.pruned import CURVE, table_of
from vllm_h3_quant.loader.header import FLOATS, Entry
from vllm_h3_quant.loader.stored import Segment, StoredLinear


@dataclass
class Plan:
    """A component, ready to be loaded if there are no ``problems``.

    Attributes:
        checkpoint: its files.
        detection: what it is.
        architecture: sizes of the DiT; None for the text encoder.
        linears: weights of linears by the model's module names.
        plain: every other tensor, by the model's name for the DiT, by its own for the text encoder.
        problems: why it cannot be loaded, one line each.
        notes: what a user should know although it loads.
    """

    checkpoint: Checkpoint
    detection: Detection
    architecture: Architecture | None
    linears: dict[str, StoredLinear] = field(default_factory=dict)
    plain: dict[str, Entry] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Stop at a checkpoint that cannot be loaded.

        Raises:
            H3QuantError: the first problem, and how many more there are.
        """
        if self.problems:
            more = len(self.problems) - 1
            also = f" (and {more} more; vllm-h3-quant check {self.checkpoint.place} lists them)" if more else ""
            raise H3QuantError(self.problems[0] + also)

    @property
    def kept(self) -> frozenset[str]:
        """Linears that a quantized checkpoint holds as values, or a part of them: its own list of exclusions."""
        if not self.detection.quantized:
            return frozenset()
        return frozenset(name for name, linear in self.linears.items() if linear.has_values)


def plan_transformer(checkpoint: Checkpoint, architecture: Architecture | None = None) -> Plan:
    """The plan of a DiT's checkpoint.

    Args:
        checkpoint: its files.
        architecture: sizes; those of ``config.json`` beside the files, or MiniMax-H3's, when None.
    """
    detection = detect(checkpoint)
    if architecture is None:
        where = f"{checkpoint.place / 'config.json'}"
        architecture = Architecture.from_config(checkpoint.config, where=where)
    if detection.curve:
        # The engine's model has the width that its configuration states, which serving a curve compares.
        table = table_of(checkpoint)
        if len(table.shape) == 2 and 0 < table.shape[1] < 2**31:
            architecture = replace(architecture, time_embed_dim=table.shape[1])
    plan = Plan(checkpoint, detection, architecture)
    if not detection.format.known or detection.layout.component != TRANSFORMER:
        plan.problems.append(
            f"{checkpoint.place}: no checkpoint of MiniMax-H3's transformer that is known here"
            f" (first tensor {next(iter(checkpoint.entries), None)!r})"
        )
        return plan
    _Builder(plan).build(architecture.tensors(curve=detection.curve))
    return plan


def plan_text_encoder(checkpoint: Checkpoint, layers: int) -> Plan:
    """The plan of a text encoder's checkpoint, of which the engine reads the first ``layers`` layers."""
    plan = Plan(checkpoint, detect(checkpoint), None)
    layout = plan.detection.layout
    has_layers = any(layout.layer(name) is not None for name in checkpoint.entries)
    if not plan.detection.format.known or layout.component != TEXT_ENCODER or not has_layers:
        plan.problems.append(f"{checkpoint.place}: no checkpoint of the text encoder that is known here")
        return plan
    _Builder(plan).build_encoder(layers)
    return plan


class _Builder:
    """Sorts a checkpoint's tensors into what belongs together."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.layout = plan.detection.layout
        self.weights: dict[str, dict[str, Found]] = defaultdict(dict)
        self.beside: dict[str, dict[str, Entry]] = defaultdict(dict)

    def problem(self, entry: Entry | None, text: str) -> None:
        """Note a problem, with the file and the tensor where one is known."""
        where = self.plan.checkpoint.place if entry is None else f"{entry.file}: tensor {entry.name!r}"
        self.plan.problems.append(f"{where} {text}")

    def build(self, expected: Mapping[str, Expected]) -> None:
        """Fill the plan of a DiT."""
        self._note_duplicates()
        for name, entry in self.plan.checkpoint.entries.items():
            bare = self.layout.bare(name)
            if is_loose(bare):
                continue
            module, leaf = split(bare)
            target = self.layout.target(module) if leaf else None
            if leaf == WEIGHT and target and len(expected.get(f"{target.module}.weight", _NONE).shape) == 2:
                self._add_weight(target, module, entry)
            elif leaf in (WEIGHT, BIAS) and target:
                self.plan.plain[f"{target.module}.{leaf}"] = entry
            elif leaf and target:
                self.beside[module][leaf] = entry
            else:
                self.plan.plain[bare] = entry
        self._check_names(expected)
        for name, pieces in self.weights.items():
            self._add_linear(name, pieces, expected[f"{name}.weight"].shape)
        self._refuse_leftovers()
        for name, wanted in expected.items():
            self._check_plain(name, wanted)
        self._note_rounded(expected)

    def build_encoder(self, layers: int) -> None:
        """Fill the plan of a text encoder."""
        self._note_duplicates()
        for name, entry in self.plan.checkpoint.entries.items():
            module, leaf = split(name)
            index = self.layout.layer(name)
            if index is not None and index >= layers:
                continue
            target = self.layout.target(module)
            if target is None or not leaf:
                self.plan.plain[name] = entry
            elif leaf == WEIGHT:
                self._add_weight(target, module, entry)
            elif leaf == BIAS:
                self.problem(entry, "is a bias of a linear that has none here")
            else:
                self.beside[module][leaf] = entry
        for name, pieces in self.weights.items():
            self._add_linear(name, pieces, None)
        self._refuse_leftovers()

    def _note_duplicates(self) -> None:
        for name in self.plan.checkpoint.duplicates:
            self.problem(self.plan.checkpoint.entries[name], "is in more than one file; keep one")

    def _add_weight(self, target: Target, module: str, entry: Entry) -> None:
        pieces = self.weights[target.module]
        if target.part in pieces:
            self.problem(entry, f"stands for {target.module}.weight, as {pieces[target.part].entry.name!r} does")
        pieces[target.part] = Found(entry, module)

    def _check_names(self, expected: Mapping[str, Expected]) -> None:
        held = {*self.plan.plain, *(f"{name}.weight" for name in self.weights)}
        for name in expected.keys() - held:
            if not expected[name].optional:
                self.plan.problems.append(f"{self.plan.checkpoint.place}: lacks {name!r}")
        known = {*expected, CURVE} if self.plan.detection.curve else set(expected)
        for index, name in enumerate([name for name in self.plan.plain if name not in known]):
            close = nearest(name, expected) if index < _HINTS else None
            hint = f"; nearest is {close!r}" if close else ""
            self.problem(self.plan.plain.pop(name), f"is no tensor of this model{hint}")
        self.plan.problems.sort()

    def _add_linear(self, name: str, pieces: Mapping[str, Found], shape: tuple[int, ...] | None) -> None:
        codings: dict[str, Coding] = {}
        for part, found in pieces.items():
            if len(found.entry.shape) != 2:
                self.problem(found.entry, f"has the shape {list(found.entry.shape)}, not rows and columns")
                return
            try:
                beside = self.beside.get(found.module, {})
                codings[part] = self.plan.detection.format.coding_of(found, beside, self.plan.checkpoint.metadata)
            except H3QuantError as error:
                self.plan.problems.append(str(error))
                return
        try:
            linear = _assemble(name, pieces, codings, shape, self.plan)
        except H3QuantError as error:
            self.plan.problems.append(str(error))
            return
        for found in pieces.values():
            self.beside.pop(found.module, None)
        self.plan.linears[name] = linear

    def _refuse_leftovers(self) -> None:
        for module, leaves in self.beside.items():
            if any(module == found.module for pieces in self.weights.values() for found in pieces.values()):
                continue  # its weight has a problem already
            for entry in leaves.values():
                self.problem(entry, "has no weight beside it: nothing would consume it")

    def _check_plain(self, name: str, wanted: Expected) -> None:
        entry = self.plan.plain.get(name)
        if entry is None:
            return
        if entry.shape != wanted.shape:
            self.problem(entry, f"has the shape {list(entry.shape)}, the model's {name} has {list(wanted.shape)}")
        if entry.dtype not in FLOATS:
            self.problem(entry, f"is {entry.dtype}, but {name} takes values")

    def _note_rounded(self, expected: Mapping[str, Expected]) -> None:
        """The engine takes such values as they are and computes with them in fp32."""
        stored = list(self.plan.plain.items())
        stored += [
            (f"{name}.weight", found.entry) for name, pieces in self.weights.items() for found in pieces.values()
        ]
        rounded = {name: entry for name, entry in stored if expected.get(name, _NONE).fp32 and entry.dtype != "F32"}
        if rounded:
            dtypes = ", ".join(sorted({entry.dtype for entry in rounded.values()}))
            self.plan.notes.append(
                f"{self.plan.checkpoint.place}: {len(rounded)} of the tensors that the model keeps in fp32 are stored"
                f" in {dtypes}, such as {min(rounded)!r}: what was rounded away is lost"
            )


_NONE = Expected(())
_HINTS = 20
"""Unexpected names that get a nearest one: each is compared with all names, 30 ms for 50 layers."""


def _assemble(
    name: str,
    pieces: Mapping[str, Found],
    codings: Mapping[str, Coding],
    shape: tuple[int, ...] | None,
    plan: Plan,
) -> StoredLinear:
    """The rows of one weight in the model's order.

    Raises:
        H3QuantError: a part is missing, or shapes do not fit each other or the model.
    """
    order = _PARTS.get(frozenset(pieces))
    if order is None:
        lacking = next((want for have, want in _PARTS.items() if have > frozenset(pieces)), None)
        if lacking is None:
            names = ", ".join(repr(found.entry.name) for found in pieces.values())
            raise H3QuantError(f"{plan.checkpoint.place}: {name} is there whole and in parts: {names}; keep one")
        raise H3QuantError(
            f"{plan.checkpoint.place}: {name} has only {', '.join(pieces)} of {', '.join(lacking)}; copy all of it"
        )
    columns = {part: codings[part].columns(pieces[part].entry.shape[1]) for part in order}
    rows = {part: pieces[part].entry.shape[0] for part in order}
    found = (sum(rows.values()), columns[order[0]])
    entry = pieces[order[0]].entry
    if len({*columns.values()}) > 1:
        told = ", ".join(f"{part} {[rows[part], columns[part]]}" for part in order)
        raise H3QuantError(f"{entry.file}: tensor {entry.name!r} and its neighbours make no {name}.weight: {told}")
    if shape is not None and found != shape:
        raise H3QuantError(
            f"{entry.file}: tensor {entry.name!r} makes {name}.weight {list(found)}, the model has {list(shape)}"
        )
    if len(order) == 1:
        segments = plan.detection.layout.segments(name, entry, codings[order[0]], plan.architecture)
    else:
        segments = tuple(Segment(pieces[part].entry, codings[part], 0, rows[part]) for part in order)
    parts = {part: (sum(rows[before] for before in order[:at]), rows[part]) for at, part in enumerate(order)}
    return StoredLinear(name, found, segments, parts)


_PARTS: dict[frozenset[str], tuple[str, ...]] = {
    frozenset(parts): parts for parts in [("",), ("q", "k", "v"), ("gate", "up")]
}
