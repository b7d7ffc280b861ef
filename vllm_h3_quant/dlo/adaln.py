"""AdaLN's outputs for the timesteps of a schedule, from weights in host memory.

MiniMax-H3's AdaLN projections hold 24.2 GiB in bf16 and do almost no work: each step puts a few rows through them, one
for each of its distinct timesteps, and which those are is known when a request starts. So a schedule's outputs are
computed in one pass over the projections, each copied to the device once while the one before it computes, and kept
there. They are computed step by step, with the rows that the step has, so that they are the bytes that the projection
itself would have returned then; the products hide behind the copies.

A step that no schedule announced is computed when it comes, by a pass of its own. Such are edits with soft masks, and
steps of several requests in one forward, which have the timesteps of all of them.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from vllm_h3_quant.dlo.adaln_operator import mark, marked, output, register
from vllm_h3_quant.dlo.device import Device
from vllm_h3_quant.log import get_logger

logger = get_logger(__name__)

TABLE_BYTES = 2**31
"""Outputs that are kept on the device. 50 steps take 0.90 GiB with the two timesteps of a clip from text, 1.35 with
keyframes or a reference's sound, 1.80 with both. Of a schedule that does not fit, as many steps are computed at a time
as do."""

MOST_SCHEDULES = 8
"""That are remembered, so that requests which take turns step by step find theirs."""


class Projection(Protocol):
    """One AdaLN projection with its weight on the host.

    Attributes:
        linear: the module that has it.
        weight: its weight there.
        width: of its output, over all ranks.
        state: of what else its output depends on (an adapter), compared by ``==``.
    """

    @property
    def linear(self) -> Any: ...

    @property
    def weight(self) -> torch.Tensor: ...

    @property
    def width(self) -> int: ...

    @property
    def state(self) -> object: ...

    def run(self, embedding: torch.Tensor, weight: torch.Tensor) -> None:
        """Call the module with ``weight`` in place, which calls :meth:`HostedAdaln.project` in turn."""
        ...


class Rest(Protocol):
    """The engine's own cache of projections, for those whose weights are on the device."""

    max_bytes: int

    def clear(self) -> None: ...

    def prepare(self, embedding: torch.Tensor) -> None: ...

    def project(
        self, name: str, module: Any, embedding: torch.Tensor, compute: Callable[[], torch.Tensor]
    ) -> torch.Tensor: ...


Embed = Callable[[torch.Tensor], torch.Tensor]
Key = tuple[int, bytes]

Kinds = Sequence[Sequence[torch.Tensor]]
"""For each kind that a request may be of, the distinct timesteps of one step after the other; the likely kind first. A
step that kinds share is taken for one of the first of them."""


class _Plan:
    """Where the steps of a schedule are. They are embedded as they are looked for.

    Attributes:
        kinds: its steps.
        places: kind and step by key, as far as they are known.
    """

    def __init__(self, kinds: Kinds) -> None:
        self.kinds = kinds
        self.places: dict[Key, tuple[int, int]] = {}

    def find(self, key: Key, embed: Embed) -> tuple[int, int] | None:
        """Kind and step of a key. The first steps of all kinds are looked at first."""
        if key in self.places:
            return self.places[key]
        known = set(self.places.values())
        for step in range(max(map(len, self.kinds), default=0)):
            for kind, steps in enumerate(self.kinds):
                if step < len(steps) and len(steps[step]) == key[0] and (kind, step) not in known:
                    found = _key(embed(steps[step]))
                    self.places.setdefault(found, (kind, step))
                    if found == key:
                        return self.places[key]
        return None


@dataclass
class _Outputs:
    """The outputs of all projections for one step."""

    rows: dict[str, torch.Tensor]
    nbytes: int


class HostedAdaln:
    """Stands where the engine keeps its cache of AdaLN outputs, for one DiT.

    Args:
        projections: those with weights on the host, by the name that they ask for their output with, in the order in
            which the DiT runs them.
        rest: the engine's cache, for the others; None where there are none.
        embed: ``(M,)`` timesteps to ``(M, E)`` embeddings, as the DiT's forward computes them.
        device: where outputs are kept.
        budget: bytes of them.

    Attributes:
        passes: how often the projections were copied.
        unannounced: how many of those were for a step of no schedule.
    """

    def __init__(
        self,
        projections: Mapping[str, Projection],
        rest: Rest | None,
        embed: Embed,
        device: Device,
        *,
        budget: int = TABLE_BYTES,
    ) -> None:
        self.projections = dict(projections)
        self.rest = rest
        self.embed = embed
        self.device = device
        self.budget = budget
        self.sidecar = None  # read by the engine: no outputs from a file
        self.passes = self.unannounced = 0
        self._widths = [projection.width for projection in self.projections.values()]
        for index, projection in enumerate(self.projections.values()):
            mark(projection.linear, index, projection.width)
        self._handle = register(self)
        self._plans: OrderedDict[object, _Plan] = OrderedDict()
        self._table: OrderedDict[Key, _Outputs] = OrderedDict()
        self._state: list[object] = []
        self._current: _Outputs | None = None
        self._embedding: torch.Tensor | None = None
        self._filling: _Outputs | None = None

    @property
    def max_bytes(self) -> int:
        """Of the engine's cache; read by the engine."""
        return self.rest.max_bytes if self.rest else 0

    @property
    def nbytes(self) -> int:
        """Bytes of outputs on the device."""
        return sum(outputs.nbytes for outputs in self._table.values())

    def clear(self) -> None:
        """Drop all outputs. The engine calls this when an adapter changes and when the DiT moves."""
        if self.rest:
            self.rest.clear()
        self._drop()
        self._current = self._embedding = None

    def announce(self, identity: object, kinds: Callable[[], Kinds]) -> None:
        """Say which steps the next request has.

        Args:
            identity: of the schedule.
            kinds: makes it; called where it is not among the last that were announced.
        """
        if identity not in self._plans:
            self._plans[identity] = _Plan(kinds())
        self._plans.move_to_end(identity)
        if len(self._plans) > MOST_SCHEDULES:
            self._plans.popitem(last=False)

    @torch.compiler.disable
    def prepare(self, embedding: torch.Tensor) -> None:
        """Have the outputs for ``(M, E)`` embeddings of one step ready.

        Called once a forward: by the DiT, or by the first projection of what runs blocks without it, as TeaCache does.
        """
        if self.rest:
            self.rest.prepare(embedding)
        self._current = None
        state = [projection.state for projection in self.projections.values()]
        if state != self._state:
            self._drop()
            self._state = state
        key = _key(embedding)
        if key not in self._table:
            self._fill(self._from(key, embedding))
        self._current, self._embedding = self._table[key], embedding

    def project(
        self, name: str, module: Any, embedding: torch.Tensor, compute: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """``(M, width)`` output of one projection, to be read only. Called by the projection."""
        if torch.compiler.is_compiling():
            # Not by the name, which is another constant in each block: they would not share a graph.
            own = marked(module)
            if own is not None:
                return output(embedding, self._handle, *own)
        elif name in self.projections:
            return self._project(name, embedding, compute)
        return self.rest.project(name, module, embedding, compute) if self.rest else compute()

    def _project(self, name: str, embedding: torch.Tensor, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        if self._filling is not None:
            self._filling.rows[name].copy_(compute())
            return self._filling.rows[name]
        if self._current is None or self._embedding is not embedding:
            self.prepare(embedding)
        assert self._current is not None
        return self._current.rows[name]

    def output_of(self, index: int) -> torch.Tensor:
        """The current output of the projection at a place in order, for the operator in compiled blocks."""
        assert self._current is not None, "a compiled block ran before prepare()"
        return list(self._current.rows.values())[index]

    def _from(self, key: Key, embedding: torch.Tensor) -> list[tuple[Key, torch.Tensor]]:
        """A step and those that follow it in its schedule, as many as are kept at once."""
        found = [(key, embedding)]
        following = self._following(key)
        if following is None:
            self.unannounced += 1
            logger.info("AdaLN: a step with %d timesteps is in no schedule and is computed by itself", key[0])
            return found
        room = self.budget - self._nbytes(key[0])
        for timesteps in following:
            room -= self._nbytes(len(timesteps))
            if room < 0:
                break
            later = self.embed(timesteps)
            found.append((_key(later), later))
        return found

    def _following(self, key: Key) -> Sequence[torch.Tensor] | None:
        """Timesteps of the steps after one, by the schedule announced last that has it; None where none has."""
        for plan in reversed(self._plans.values()):
            place = plan.find(key, self.embed)
            if place is not None:
                kind, step = place
                return plan.kinds[kind][step + 1 :]
        return None

    def _drop(self) -> None:
        """Forget outputs, and the embeddings by which steps are found: an adapter may change both."""
        self._table.clear()
        for plan in self._plans.values():
            plan.places.clear()

    def _fill(self, steps: list[tuple[Key, torch.Tensor]]) -> None:
        """One pass over the projections for all of ``steps``."""
        started = time.perf_counter()
        missing = [(key, embedding) for key, embedding in dict(steps).items() if key not in self._table]
        self._make_room(sum(self._nbytes(key[0]) for key, _ in missing), keep={key for key, _ in steps})
        outputs = {key: self._allocate(key[0]) for key, _ in missing}
        try:
            for projection, weight in self._arrivals():
                for key, embedding in missing:
                    self._filling = outputs[key]
                    projection.run(embedding, weight)
        finally:
            self._filling = None
        self._table.update(outputs)
        self.passes += 1
        logger.debug("AdaLN: %d steps in %.2f s", len(missing), time.perf_counter() - started)

    def _arrivals(self) -> Iterator[tuple[Projection, torch.Tensor]]:
        """Each projection with its weight on the device. Two are there at a time: one computes, the next arrives."""
        projections = list(self.projections.values())
        largest = max(projection.weight.numel() for projection in projections)
        dtype = projections[0].weight.dtype
        slots = [torch.empty(largest, dtype=dtype, device=self.device.torch) for _ in projections[:2]]
        with self.device.copies() as copies:
            copies.start(_into(slots[0], projections[0]), projections[0].weight)
            for index, projection in enumerate(projections):
                copies.arrive()
                if index + 1 < len(projections):
                    # After the products of the projection before this one, which read the same slot.
                    following = projections[index + 1]
                    copies.start(_into(slots[(index + 1) % 2], following), following.weight)
                yield projection, _into(slots[index % 2], projection)

    def _make_room(self, nbytes: int, keep: set[Key]) -> None:
        for key in list(self._table):
            if self.nbytes + nbytes <= self.budget:
                return
            if key not in keep:
                del self._table[key]

    def _allocate(self, rows: int) -> _Outputs:
        whole = torch.empty(rows * sum(self._widths), dtype=torch.bfloat16, device=self.device.torch)
        parts = whole.split([rows * width for width in self._widths])
        named = zip(self.projections, parts, self._widths, strict=True)
        return _Outputs({name: part.view(rows, width) for name, part, width in named}, whole.numel() * whole.itemsize)

    def _nbytes(self, rows: int) -> int:
        return 2 * rows * sum(self._widths)


def _into(slot: torch.Tensor, projection: Projection) -> torch.Tensor:
    return slot[: projection.weight.numel()].view(projection.weight.shape)


def _key(embedding: torch.Tensor) -> Key:
    """The bytes of embeddings, and how many rows they are."""
    return embedding.shape[0], embedding.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
