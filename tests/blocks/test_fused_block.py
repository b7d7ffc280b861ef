"""A fused block gives the bytes of the same block without fusion, whatever keeps single edges from it.

On a GPU this holds the producers against the engine's own kernels at MiniMax-H3's sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Module

from vllm_h3_quant.blocks.edges import GATED, PADDED, SHAPE, Edge, obstacles
from vllm_h3_quant.kernels.rows import QuantizedRows
from vllm_h3_quant.methods.base import H3LinearMethod

ON_GPU = torch.cuda.is_available()
LENGTHS = [[4099], [8192, 57], [32704]] if ON_GPU else [[1], [150, 7]]
EVERY = set(Edge)

Build = Callable[..., Any]
Inputs = Callable[[list[int]], tuple[torch.Tensor, dict[str, Any]]]


def fused_edges(block: Any) -> set[Edge]:
    return {edge for edge, obstacle in obstacles(block).items() if obstacle is None}


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> dict[str, type]:
    """What each of our linears was last given."""
    seen: dict[str, type] = {}
    apply = H3LinearMethod.apply

    def watched(self: H3LinearMethod, layer: Any, x: Any, bias: Any = None) -> torch.Tensor:
        seen[self.name.removeprefix("blocks.0.")] = type(x)
        return apply(self, layer, x, bias)

    monkeypatch.setattr(H3LinearMethod, "apply", watched)
    return seen


@pytest.mark.parametrize(
    ("method", "options", "edges"),
    [
        ("h3_fp8", {}, {Edge.QKV, Edge.FC1, Edge.FC2}),
        ("h3_fp8", {"attention": "fp8"}, EVERY),
        ("h3_int8", {"attention": "int8"}, EVERY - {Edge.OUT}),
        ("h3_int8", {"attention": "fp8", "rotation": 128}, EVERY),
    ],
    ids=["fp8", "fp8, attention fp8", "int8, attention int8", "int8, attention fp8"],
)
def test_fusion_changes_no_byte(
    method: str, options: dict[str, Any], edges: set[Edge], build: Build, inputs: Inputs, taken: dict[str, type]
) -> None:
    fused, plain = build(method, **options), build(method, fuse=False, **options)
    assert fused_edges(fused) == edges
    assert not fused_edges(plain)
    for lengths in LENGTHS:
        x, arguments = inputs(lengths)
        wanted = plain(x, **arguments)
        assert set(taken.values()) == {torch.Tensor}
        found = fused(x, **arguments)
        assert same_bytes(found, wanted), lengths
        assert (found - x).abs().max() > 0
    linears = {Edge.QKV: "attn.qkv_proj", Edge.OUT: "attn.out_proj", Edge.FC1: "mlp.fc1", Edge.FC2: "mlp.fc2"}
    for edge, name in linears.items():
        assert taken[name] is (QuantizedRows if edge in edges else torch.Tensor), name
    assert taken["adaln_proj.linear"] is torch.Tensor


def test_no_tokens(build: Build, inputs: Inputs) -> None:
    x, arguments = inputs([5])
    arguments |= {"combined_indices": arguments["combined_indices"][:0], "rope_table": arguments["rope_table"][:0]}
    arguments["cu_seqlens"] = arguments["cu_seqlens"] * 0
    assert build("h3_fp8", attention="fp8")(x[:0], **arguments).shape == (0, x.shape[1])


class Wrapper(Module):
    """What the engine's LoRA does to a linear: another module in its place, which needs the activation."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: torch.Tensor) -> Any:
        out, bias = self.base(x)
        return out + x.mean(-1, keepdim=True), bias


@pytest.mark.parametrize(
    ("path", "edge"),
    [
        ("attn.qkv_proj", Edge.QKV),
        ("attn.out_proj", Edge.OUT),
        ("mlp.fc1", Edge.FC1),
        ("mlp.fc2", Edge.FC2),
    ],
)
def test_a_wrapped_or_hooked_linear_gets_its_activation(path: str, edge: Edge, build: Build, inputs: Inputs) -> None:
    fused, plain = (build("h3_fp8", attention="fp8", fuse=fuse) for fuse in (True, False))
    x, arguments = inputs([LENGTHS[0][0], 6])
    parent, name = path.split(".")
    seen: list[Any] = []
    removable = getattr(getattr(fused, parent), name).register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    assert fused_edges(fused) == EVERY - {edge}
    assert same_bytes(fused(x, **arguments), plain(x, **arguments))
    assert [type(given) for given in seen] == [torch.Tensor]
    removable.remove()
    assert fused_edges(fused) == EVERY
    for block in (fused, plain):
        around = getattr(block, parent)
        setattr(around, name, Wrapper(getattr(around, name)))
    assert fused_edges(fused) == EVERY - {edge}
    assert same_bytes(fused(x, **arguments), plain(x, **arguments))


@pytest.mark.parametrize(
    ("ignored", "edges"),
    [
        (["blocks.0.attn"], {Edge.ATTENTION, Edge.FC1, Edge.FC2}),
        (["blocks.0.mlp"], {Edge.QKV, Edge.ATTENTION, Edge.OUT}),
        (["blocks.0.mlp.fc1", "blocks.0.attn.out_proj"], {Edge.QKV, Edge.ATTENTION, Edge.FC2}),
    ],
    ids=["attention", "mlp", "fc1 and out_proj"],
)
def test_linears_that_keep_their_precision(ignored: list[str], edges: set[Edge], build: Build, inputs: Inputs) -> None:
    fused, plain = (build("h3_fp8", attention="fp8", ignored_layers=ignored, fuse=fuse) for fuse in (True, False))
    x, arguments = inputs([LENGTHS[0][0], 6])
    assert fused_edges(fused) == edges
    assert same_bytes(fused(x, **arguments), plain(x, **arguments))


@pytest.mark.parametrize("watched", ["attn", "attn.attention", "mlp", "mlp.act_fn"])
def test_a_hook_on_a_part_sees_what_it_saw(watched: str, build: Build, inputs: Inputs) -> None:
    fused, plain = (build("h3_fp8", attention="fp8", fuse=fuse) for fuse in (True, False))
    x, arguments = inputs([LENGTHS[0][0], 6])
    seen: list[torch.Tensor] = []
    for block in (fused, plain):
        block.get_submodule(watched).register_forward_hook(lambda _, given, out: seen.append(out))
        block(x, **arguments)
    assert len(seen) == 2
    assert same_bytes(*seen)


def test_what_the_kernels_do_not_serve_is_told(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    block = build("h3_fp8", attention="fp8")
    outside = EVERY - {Edge.ATTENTION, Edge.OUT}
    with monkeypatch.context() as patch:
        patch.setattr(block.attn, "to_gate_compress", Module())
        assert obstacles(block)[Edge.ATTENTION] == GATED
        assert fused_edges(block) == outside
    with monkeypatch.context() as patch:
        patch.setattr(block.attn, "rot_dim", 64)
        assert obstacles(block)[Edge.ATTENTION] == SHAPE
        assert fused_edges(block) == outside
    with monkeypatch.context() as patch:
        patch.setattr(H3LinearMethod, "aligned", lambda self, size: size + 16)
        assert {obstacles(block)[edge] for edge in EVERY - {Edge.ATTENTION}} == {PADDED}
    assert fused_edges(block) == EVERY


def test_a_skipped_step_runs_the_engines_attention(
    build: Build, inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"attention": "fp8", "attention_skip_steps": "1"}
    fused, plain = (build("h3_fp8", fuse=fuse, **options) for fuse in (True, False))
    x, arguments = inputs([LENGTHS[0][0], 6])
    outs = []
    for step in (0, 1):
        monkeypatch.setattr("vllm_h3_quant.attention.implementation.denoise_step", lambda step=step: step)
        outs.append(fused(x, **arguments))
        assert same_bytes(outs[-1], plain(x, **arguments)), step
    assert not same_bytes(*outs)


def test_one_compilation_serves_several_lengths(build: Build, inputs: Inputs) -> None:
    """Dynamo sees the producers as operators; what is compiled is the block as it is, apart from attention."""
    block = build("h3_fp8", attention="fp8")
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(block.forward, backend=counter, dynamic=True)
    for lengths in ([150, 7], [210, 30], [77, 9]):
        x, arguments = inputs(lengths)
        assert same_bytes(compiled(x, **arguments), block(x, **arguments))
        if lengths == [150, 7]:
            frames = counter.frame_count
            assert frames == 2, "one on either side of attention"
    assert counter.frame_count == frames
