"""Outputs of AdaLN for a schedule, from weights in host memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from vllm_h3_quant.dlo.adaln import MOST_SCHEDULES, HostedAdaln
from vllm_h3_quant.dlo.device import Device
from vllm_h3_quant.platforms.host_stream import HOST_STREAM, HostEvent, HostStream

WIDTHS = (12, 12, 12, 4)
INPUTS = 8


class Platform:
    """A device that does one thing at a time."""

    Stream, Event = HostStream, HostEvent

    @staticmethod
    def current_stream() -> HostStream:
        return HOST_STREAM

    @staticmethod
    @contextmanager
    def stream(stream: HostStream) -> Iterator[None]:
        yield


class Projection:
    """A linear whose weight is on the host, and the module that asks for its output."""

    def __init__(self, name: str, width: int) -> None:
        self.name, self.width = name, width
        self.weight = torch.randn(width, INPUTS, dtype=torch.bfloat16)
        self.state: object = None
        self.runs = 0
        self.cache: HostedAdaln | None = None
        self.fails = False

    @property
    def linear(self) -> Projection:
        return self

    def run(self, embedding: torch.Tensor, weight: torch.Tensor) -> None:
        self(embedding, weight)

    def __call__(self, embedding: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        assert self.cache is not None
        return self.cache.project(self.name, self, embedding, lambda: self.compute(embedding, weight))

    def compute(self, embedding: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        self.runs += 1
        if self.fails:
            raise RuntimeError("no more memory")
        return F.linear(F.silu(embedding).bfloat16(), self.weight if weight is None else weight)


class Rest:
    """The engine's cache."""

    max_bytes = 7

    def __init__(self) -> None:
        self.said: list[str] = []

    def clear(self) -> None:
        self.said.append("clear")

    def prepare(self, embedding: torch.Tensor) -> None:
        self.said.append("prepare")

    def project(self, name: str, module: Any, embedding: torch.Tensor, compute: Any) -> torch.Tensor:
        self.said.append(name)
        found: torch.Tensor = compute()
        return found


def embed(timesteps: torch.Tensor) -> torch.Tensor:
    return torch.outer(timesteps, torch.arange(1, INPUTS + 1)).sin()


def announce(cache: HostedAdaln, identity: object, *kinds: Sequence[Sequence[float]]) -> None:
    cache.announce(identity, lambda: [[torch.tensor(step) for step in steps] for steps in kinds])


def hosted(budget: int = 2**30, rest: Rest | None = None) -> tuple[HostedAdaln, list[Projection]]:
    torch.manual_seed(0)
    projections = [Projection(f"blocks.{index}", width) for index, width in enumerate(WIDTHS)]
    cache = HostedAdaln(
        {p.name: p for p in projections}, rest, embed, Device(torch.device("cpu"), Platform()), budget=budget
    )
    for projection in projections:
        projection.cache = cache
    return cache, projections


def step(cache: HostedAdaln, projections: list[Projection], timesteps: Sequence[float]) -> None:
    """A forward; every output has the bytes of the projection itself."""
    embedding = embed(torch.tensor(timesteps))
    cache.prepare(embedding)
    for projection in projections:
        expected = F.linear(F.silu(embedding).bfloat16(), projection.weight)
        assert torch.equal(projection(embedding), expected)


STEPS = [[0.0, 0.1], [0.3, 0.5], [0.7, 0.9]]
ROW = 2 * sum(WIDTHS)


def test_one_pass_serves_a_schedule_and_the_next_requests_of_it() -> None:
    cache, projections = hosted()
    for _ in range(2):
        announce(cache, "a", STEPS)
        for timesteps in STEPS:
            step(cache, projections, timesteps)
    assert (cache.passes, cache.unannounced) == (1, 0)
    assert [projection.runs for projection in projections] == [3] * 4
    assert cache.nbytes == 6 * ROW


def test_a_request_of_another_kind_than_the_likely_one() -> None:
    cache, projections = hosted()
    three = [[0.0, 0.1, 0.95], [0.3, 0.5, 0.95], [0.7, 0.9, 0.95]]
    announce(cache, "a", STEPS, three)
    for timesteps in three:
        step(cache, projections, timesteps)
    for timesteps in STEPS:
        step(cache, projections, timesteps)
    assert (cache.passes, cache.unannounced) == (2, 0)


def test_a_step_that_kinds_share_is_one_of_the_likely_kind() -> None:
    cache, projections = hosted()
    other = [STEPS[0], [0.4, 0.6], [0.8, 0.95]]
    for identity, kinds in (("a", (STEPS, other)), ("b", (other, STEPS))):
        cache.clear()
        before = cache.passes
        announce(cache, identity, *kinds)
        for timesteps in kinds[0]:
            step(cache, projections, timesteps)
        assert cache.passes == before + 1


def test_requests_that_take_turns_step_by_step() -> None:
    cache, projections = hosted()
    other = [[0.05, 0.15], [0.4, 0.6], [0.8, 0.95]]
    announce(cache, "a", STEPS)
    announce(cache, "b", other)
    for pair in zip(STEPS, other, strict=True):
        for timesteps in pair:
            step(cache, projections, timesteps)
    assert (cache.passes, cache.unannounced) == (2, 0)


def test_old_schedules_are_forgotten() -> None:
    cache, projections = hosted()
    announce(cache, "old", STEPS)
    for identity in range(MOST_SCHEDULES):
        announce(cache, identity, [[0.05 + identity / 100, 0.15]])
    step(cache, projections, STEPS[0])
    assert cache.unannounced == 1


def test_an_adapter_may_change_the_embeddings_too() -> None:
    cache, projections = hosted()
    announce(cache, "a", STEPS)
    step(cache, projections, STEPS[0])
    cache.embed = lambda timesteps: embed(timesteps + 1)
    cache.clear()
    for timesteps in STEPS:
        step(cache, projections, [t + 1 for t in timesteps])
    assert (cache.passes, cache.unannounced) == (2, 0)


def test_a_step_of_no_schedule_is_computed_when_it_comes() -> None:
    cache, projections = hosted()
    announce(cache, "a", STEPS)
    step(cache, projections, [0.25])
    step(cache, projections, [0.25, 0.35])
    step(cache, projections, [0.25])
    assert (cache.passes, cache.unannounced) == (2, 2)
    step(cache, projections, STEPS[1])  # in the middle: only what follows is computed with it
    assert (cache.passes, cache.nbytes) == (3, (3 + 4) * ROW)


def test_without_any_schedule() -> None:
    cache, projections = hosted()
    step(cache, projections, [0.25])
    assert (cache.passes, cache.unannounced) == (1, 1)


def test_a_forward_that_prepares_nothing() -> None:
    """As under TeaCache, which runs blocks without the DiT's forward, maybe compiled ones behind the first."""
    cache, projections = hosted()
    announce(cache, "a", STEPS)
    for timesteps in STEPS:
        embedding = embed(torch.tensor(timesteps))
        for index, projection in enumerate(projections):
            expected = F.linear(F.silu(embedding).bfloat16(), projection.weight)
            assert torch.equal(projection(embedding), expected)
            assert torch.equal(cache.output_of(index), expected)
    assert (cache.passes, cache.unannounced) == (1, 0)


def test_a_schedule_that_does_not_fit_is_computed_in_parts() -> None:
    cache, projections = hosted(budget=5 * ROW)
    announce(cache, "a", STEPS)
    for _ in range(2):
        for timesteps in STEPS:
            step(cache, projections, timesteps)
            assert cache.nbytes <= cache.budget
    assert (cache.passes, cache.unannounced) == (4, 0)


def test_one_step_is_served_whatever_the_budget() -> None:
    cache, projections = hosted(budget=1)
    announce(cache, "a", STEPS)
    for timesteps in STEPS:
        step(cache, projections, timesteps)
    assert (cache.passes, cache.nbytes) == (3, 2 * ROW)


def test_another_schedule_leaves_what_was_computed() -> None:
    cache, projections = hosted()
    other = [[0.0, 0.1], [0.4, 0.6]]
    for identity, steps in (("a", STEPS), ("b", other), ("a", STEPS), ("b", other)):
        announce(cache, identity, steps)
        for timesteps in steps:
            step(cache, projections, timesteps)
    assert cache.passes == 2


def test_outputs_are_dropped_when_an_adapter_changes() -> None:
    cache, projections = hosted()
    announce(cache, "a", STEPS)
    step(cache, projections, STEPS[0])
    projections[2].weight += 1  # as an adapter would, which the state tells
    projections[2].state = "adapter"
    step(cache, projections, STEPS[0])
    cache.clear()
    assert cache.nbytes == 0
    step(cache, projections, STEPS[0])
    assert cache.passes == 3


def test_at_most_two_weights_are_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, projections = hosted()
    made: list[int] = []
    empty = torch.empty

    def counting(*shape: Any, **options: Any) -> torch.Tensor:
        found = empty(*shape, **options)
        made.append(found.numel())
        return found

    monkeypatch.setattr(torch, "empty", counting)
    announce(cache, "a", STEPS)
    cache.prepare(embed(torch.tensor(STEPS[0])))
    largest = max(projection.weight.numel() for projection in projections)
    assert sorted(made) == sorted([largest, largest] + [2 * sum(WIDTHS)] * 3)


def test_an_error_in_a_pass_leaves_nothing_half_computed() -> None:
    cache, projections = hosted()
    announce(cache, "a", STEPS)
    projections[2].fails = True
    with pytest.raises(RuntimeError, match="no more memory"):
        step(cache, projections, STEPS[0])
    assert cache.nbytes == 0
    projections[2].fails = False
    for timesteps in STEPS:
        step(cache, projections, timesteps)
    assert cache.passes == 1


def test_projections_on_the_device_are_the_engines_affair() -> None:
    rest = Rest()
    cache, _ = hosted(rest=rest)
    assert cache.max_bytes == 7
    embedding = embed(torch.tensor([0.5]))
    cache.prepare(embedding)
    assert cache.project("elsewhere", None, embedding, lambda: embedding) is embedding
    cache.clear()
    assert rest.said == ["prepare", "elsewhere", "clear"]
    alone, _ = hosted()
    assert alone.project("elsewhere", None, embedding, lambda: embedding) is embedding


def test_a_compiled_block_gets_a_copy_of_its_own() -> None:
    cache, projections = hosted()
    announce(cache, "a", STEPS)
    embedding = embed(torch.tensor(STEPS[0]))
    cache.prepare(embedding)

    def block(t_emb: torch.Tensor) -> torch.Tensor:
        return projections[1](t_emb)

    found = torch.compile(block, backend="eager", fullgraph=True)(embedding)
    kept = projections[1](embedding)
    assert torch.equal(found, kept)
    found.zero_()
    assert projections[1](embedding).any()
    assert (cache.passes, projections[1].runs) == (1, 3)
