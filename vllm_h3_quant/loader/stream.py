"""A component's tensors under the names and in the layout that the engine's ``load_weights`` takes.

For a weight that a linear method reads by itself (``taken``) the stream yields a stand-in: a tensor of the
checkpoint's shape on the meta device. The engine reorders and splits it as it would the weight, which costs nothing,
and the method is told with it that the weight, or which part of it, is due.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import torch

from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.loader.architecture import ROPE, Architecture
from vllm_h3_quant.loader.coding import Values
from vllm_h3_quant.loader.formats import split
from vllm_h3_quant.loader.formats.base import Layout
from vllm_h3_quant.loader.formats.beside import WEIGHT
from vllm_h3_quant.loader.formats.pruned import CURVE
from vllm_h3_quant.loader.header import Entry
from vllm_h3_quant.loader.plan import Plan
from vllm_h3_quant.loader.reader import mapped
from vllm_h3_quant.loader.stored import StoredLinear
from vllm_h3_quant.upstream.curve import TABLE

Tensors = Iterator[tuple[str, torch.Tensor]]
Done = Callable[[Entry], None]


def transformer_stream(plan: Plan, taken: Collection[str], *, wanted: Layout, arrive: Done, done: Done) -> Tensors:
    """The tensors of a DiT, in the order of files and bytes.

    Args:
        plan: of its checkpoint, without problems.
        taken: linears that read their weight by themselves.
        wanted: the layout in which the engine's model takes them
            (:func:`~vllm_h3_quant.loader.formats.engine_layout`).
        arrive: called with each tensor of the checkpoint before it is due.
        done: called with each once the engine has asked for the next.

    Raises:
        H3QuantError: the engine takes parts of fused weights under names that the checkpoint does not have.
    """
    if not wanted.fused:
        yield from _stream_as_stored(plan, taken, wanted, arrive, done)
        return
    last = {linear.due: linear for linear in plan.linears.values()}
    parts = {entry for linear in plan.linears.values() for entry in linear.entries}
    names = {entry: name for name, entry in plan.plain.items()}
    for entry in plan.checkpoint.entries.values():
        if entry in last:
            linear = last[entry]
            for part in linear.entries:
                arrive(part)
            if linear.name in taken:
                yield f"{linear.name}.weight", _stand_in(linear.shape)
            else:
                yield f"{linear.name}.weight", _weight(linear, plan, wanted)
        elif entry not in parts:
            arrive(entry)
            if entry in names:
                name = names[entry]
                yield TABLE if name == CURVE else name, mapped(entry)
        done(entry)
    if ROPE not in plan.plain and plan.architecture is not None:
        yield ROPE, rope_frequencies(plan.architecture)


def encoder_stream(plan: Plan, taken: Collection[str], *, arrive: Done, done: Done) -> Tensors:
    """The tensors of a text encoder, as :func:`transformer_stream`, under the checkpoint's own names, parts apart."""
    linears = {entry: linear for linear in plan.linears.values() for entry in linear.entries}
    names = {entry: name for name, entry in plan.plain.items()}
    for entry in plan.checkpoint.entries.values():
        arrive(entry)
        if entry in linears:
            linear = linears[entry]
            for name, first, rows in _encoder_parts(plan, linear, entry):
                if linear.name in taken:
                    yield name, _stand_in((rows, linear.shape[1]))
                else:
                    yield name, linear.values(first, rows, linear.value_dtype)
        elif entry in names:
            yield names[entry], mapped(entry)
        done(entry)


def rope_frequencies(architecture: Architecture) -> torch.Tensor:
    """``rope.inv_freq`` of a checkpoint that leaves it out: ``theta ** (-i / n)`` for ``i`` below ``n``, fp32."""
    count = architecture.rope_inv_freq_len
    exponents = torch.arange(0, 2 * count, 2, dtype=torch.float32) / (2 * count)
    return 1.0 / architecture.rope_theta**exponents


def _stream_as_stored(plan: Plan, taken: Collection[str], wanted: Layout, arrive: Done, done: Done) -> Tensors:
    if plan.detection.layout != wanted:
        raise H3QuantError(
            f"{plan.checkpoint.place}: the engine expects {wanted.named} names in this model, but it is a"
            f" {plan.detection.name} checkpoint; serve it in a folder of MiniMax-H3's own layout (FL2VA/transformer)"
        )
    linears = {entry: linear for linear in plan.linears.values() for entry in linear.entries}
    plain = set(plan.plain.values())
    for name, entry in plan.checkpoint.entries.items():
        arrive(entry)
        linear = linears.get(entry)
        if linear is None and entry not in plain:
            pass
        elif linear is not None and linear.name in taken:
            yield name, _stand_in((entry.shape[0], linear.shape[1]))
        elif linear is not None:
            coding = next(segment.coding for segment in linear.segments if segment.entry == entry)
            raw = mapped(entry)
            yield name, raw if isinstance(coding, Values) else coding.decode(raw, 0).to(torch.bfloat16)
        else:
            yield name, mapped(entry)
        done(entry)


def _weight(linear: StoredLinear, plan: Plan, wanted: Layout) -> torch.Tensor:
    """A weight with its rows as the engine wants them, which reorders them itself."""
    rows = linear.shape[0]
    only = linear.segments[0]
    stored = [(segment.file_row, segment.rows) for segment in linear.segments]
    if (
        isinstance(only.coding, Values)
        and len(linear.entries) == 1
        and stored == wanted.runs(linear.name, rows, plan.architecture)
    ):
        return mapped(only.entry)
    return wanted.reordered(linear.name, linear.values(0, rows, linear.value_dtype), plan.architecture)


def _encoder_parts(plan: Plan, linear: StoredLinear, entry: Entry) -> list[tuple[str, int, int]]:
    """The engine's names of what a checkpoint's tensor holds, each with first row and number of rows."""
    part = next(name for name, owner in _owners(linear).items() if owner == entry)
    if part:
        return [(entry.name, *linear.parts[part])]
    module, _ = split(entry.name)
    found, first = [], 0
    for name, rows in plan.detection.layout.taken_apart(module, linear.shape[0], plan.checkpoint):
        found.append((f"{name}.{WEIGHT}", first, rows))
        first += rows
    return found


def _owners(linear: StoredLinear) -> dict[str, Entry]:
    """The tensor of each part of a linear."""
    found = {}
    for part, (first, _) in linear.parts.items():
        begin = 0
        for segment in linear.segments:
            if begin == first:
                found[part] = segment.entry
            begin += segment.rows
    return found


def _stand_in(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")
