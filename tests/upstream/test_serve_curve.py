"""MiniMax-H3's DiT on a curve: AdaLN's outputs, the cache beside them, and what must not change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import linear, silu
from vllm.config import set_current_vllm_config

from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.tiny_h3.spec import TinyH3
from vllm_h3_quant.tiny_h3.tensors import RandomTensors
from vllm_h3_quant.tiny_h3.transformer import transformer_config, transformer_state
from vllm_h3_quant.upstream import curve, preflight
from vllm_h3_quant.upstream.curve import TABLE, Curve, serve_curve

GRID, WIDTH = 1025, 8
SPEC = TinyH3(layers=2, refiner_layers=1, hidden=64, ffn=64)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TIMESTEPS = (0.0, 1 / 1024, 0.0017, 0.25, 0.123456, 0.999, 1.0)
"""Rows of the table, points between two of them, a first step after a shifted schedule's, a condition, and the end."""
State = dict[str, torch.Tensor]
Build = Callable[..., Any]


@pytest.fixture(autouse=True)
def in_engine(one_rank: Any) -> Iterator[None]:
    # The engine makes parameters outside of inference mode, and its cache tells by their versions what has changed.
    with set_current_vllm_config(one_rank), torch.no_grad():
        yield


@pytest.fixture(scope="module")
def full() -> State:
    return transformer_state(SPEC, RandomTensors(0))


@pytest.fixture
def build(in_engine: None, tmp_path: Path) -> Build:
    """``build(width)``: a model of the tiny sizes without weights, with AdaLN inputs of that width."""
    from vllm_omni.diffusion.config import set_current_diffusion_config
    from vllm_omni.diffusion.data import OmniDiffusionConfig, TransformerConfig
    from vllm_omni.diffusion.forward_context import set_forward_context
    from vllm_omni.diffusion.models.minimax_h3.minimax_h3_transformer import MiniMaxH3DiTModel

    from vllm_h3_quant.upstream.attention import MODEL_CLASSES

    def build(width: int | None = None, *, cached: bool = True) -> Any:
        sizes = transformer_config(SPEC) | ({} if width is None else {"time_embed_dim": width})
        config = OmniDiffusionConfig(
            model=str(tmp_path),
            model_class_name=MODEL_CLASSES[0],
            tf_model_config=TransformerConfig.from_dict(sizes),
            cache_config={"minimax_h3_adaln_cache": cached},
        )
        with set_current_diffusion_config(config), set_forward_context(omni_diffusion_config=config), DEVICE:
            return MiniMaxH3DiTModel(config).eval()

    return build


@pytest.fixture
def pruned(build: Build, full: State) -> tuple[Any, State]:
    """A model on the honest curve of the tiny model, and its state by the engine's names."""
    state = {name: tensor for name, tensor in full.items() if not name.startswith("time_embedder.")}
    unpruned = loaded(build(), full)
    points = silu(unpruned.time_embedder(torch.arange(GRID, device=DEVICE) / (GRID - 1))).double().cpu()
    basis = torch.linalg.svd(points, full_matrices=False).Vh[:WIDTH].T
    for name in [name for name in state if name.endswith("adaln_proj.linear.weight")]:
        state[name] = (full[name].double() @ basis).bfloat16()
    state[TABLE] = (points @ basis).float()
    model = build(WIDTH)
    serve_curve(model, GRID, WIDTH)
    return loaded(model, state), state


def loaded(model: Any, state: State) -> Any:
    assert model.load_weights(state.items()) == state.keys()
    model.post_load_weights()
    return model


def projections(model: Any) -> dict[str, Any]:
    found = {f"blocks.{index}.adaln_proj.linear": block.adaln_proj for index, block in enumerate(model.blocks)}
    return found | {"final_layer.adaln_proj.linear": model.final_layer.adaln_proj}


def joined(parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """A projection's vectors as the rows that the linear gave."""
    return torch.cat(parts, dim=-1)


@pytest.mark.parametrize("symbol", curve.SYMBOLS, ids=lambda symbol: symbol.path)
def test_installed_versions_have_every_symbol(symbol: preflight.Symbol) -> None:
    assert preflight.problem(symbol) is None


def test_the_table_is_a_persistent_buffer_in_fp32(pruned: tuple[Any, State]) -> None:
    model, state = pruned
    table = dict(model.named_buffers())[TABLE]
    assert table.dtype is torch.float32
    assert TABLE in model.state_dict()
    assert torch.equal(table.cpu(), state[TABLE])
    assert not [name for name, _ in model.named_parameters() if name.startswith("time_embedder")]


def test_a_point_lies_on_the_line_between_two_rows() -> None:
    """By hand: rows 0, 10 and 40 at t = 0, 1/2 and 1; numbers that fp32 holds."""
    module = Curve(3, 1, DEVICE)
    assert module(torch.tensor([0.0, 1.0], device=DEVICE)).isnan().all()
    module.table.copy_(torch.tensor([[0.0], [10.0], [40.0]]))
    timesteps = torch.tensor([-0.5, 0.0, 0.25, 0.5, 0.75, 1.0, 1.5], device=DEVICE)
    points = module(timesteps)
    assert points.flatten().tolist() == [0, 0, 5, 10, 25, 40, 40]
    assert points.shape == (7, 1)
    assert torch.equal(module(timesteps.double()), points)


def test_outputs_are_the_linear_of_the_curve_without_silu(pruned: tuple[Any, State]) -> None:
    model, state = pruned
    timesteps = torch.tensor(TIMESTEPS)
    rows = []
    for t in timesteps:
        position = t * (GRID - 1)
        left = min(int(position), GRID - 2)
        rows.append(torch.lerp(state[TABLE][left], state[TABLE][left + 1], position - left))
    points = model.time_embedder(timesteps.to(DEVICE))
    assert torch.equal(points.cpu(), torch.stack(rows))
    for name, projection in projections(model).items():
        weight, bias = state[f"{name}.weight"].to(DEVICE), state[f"{name}.bias"].to(DEVICE)
        want = linear(points.bfloat16(), weight, bias)
        got = joined(projection(points))
        assert torch.equal(got.reshape(want.shape), want), name
        assert len(projection(points)) == (2 if name.startswith("final") else 6)


def test_outputs_are_close_to_the_unpruned_models(build: Build, full: State, pruned: tuple[Any, State]) -> None:
    """At every timestep of every projection, bias left out, relative to the projection's magnitude.

    Rounding to bf16 is off by at most 2^-8, with an rms of r = 2^-8 / sqrt(3) at most. Full weights are bf16
    already. The unpruned model rounds 128 inputs, with independent errors: r of the norm of a sum of as many terms.
    The pruned one's weights are rounded, r, and its input, of which the first number nearly is the whole output: 2^-8.
    Both round outputs with a bias in them, whose deviation of 0.5 makes r as large as (m^2 + 0.25)^1/2 / m for a
    projection with an rms of m. Rank 8 leaves out less than 1e-6. The bound is the sum of all.
    """
    reference, (model, state) = loaded(build(), full), pruned
    timesteps = torch.tensor(TIMESTEPS, device=DEVICE)
    unpruned, served = reference.time_embedder(timesteps), model.time_embedder(timesteps)
    for (name, ours), theirs in zip(projections(model).items(), projections(reference).values(), strict=True):
        bias = state[f"{name}.bias"].float().to(DEVICE)
        got, want = (
            joined(projection(x)).reshape(len(TIMESTEPS), -1).float() - bias
            for projection, x in ((ours, served), (theirs, unpruned))
        )
        error = (got - want).norm(dim=1) / want.norm(dim=1)
        rms = float(want.norm(dim=1).min()) / bias.numel() ** 0.5
        rounding = 2**-8 * 3**-0.5
        assert float(error.max()) < 2 * rounding + 2**-8 + 2 * rounding * (rms**2 + 0.25) ** 0.5 / rms, name


def test_the_cache_of_projections_keeps_working(pruned: tuple[Any, State], build: Build) -> None:
    model, state = pruned
    uncached = build(WIDTH, cached=False)
    serve_curve(uncached, GRID, WIDTH)
    loaded(uncached, state)
    first, second = (model.time_embedder(torch.tensor([t, 1.0], device=DEVICE)) for t in (0.25, 0.5))
    cache = model.adaln_cache
    for embedding, hits in ((first, 0), (second, 0), (first, 3)):
        before = cache.hits
        cache.prepare(embedding)
        for ours, plain in zip(projections(model).values(), projections(uncached).values(), strict=True):
            assert torch.equal(joined(ours(embedding)), joined(plain(embedding)))
        assert cache.hits - before == hits
    assert uncached.adaln_cache.hits == 0


def test_other_models_keep_their_silu_and_time_embedder(build: Build, full: State) -> None:
    before, served = loaded(build(), full), build(WIDTH)
    embedding = before.time_embedder(torch.tensor([0.5], device=DEVICE))
    outputs = [joined(projection(embedding)) for projection in projections(before).values()]
    serve_curve(served, GRID, WIDTH)
    after = loaded(build(), full)
    for model in (before, after):
        for projection, want in zip(projections(model).values(), outputs, strict=True):
            assert torch.equal(joined(projection(embedding)), want)
        assert not isinstance(model.time_embedder, Curve)


def test_nothing_else_of_the_model_changes(build: Build) -> None:
    """The same parameters in the same order, the same modules and the same hooks but for the time embedder."""
    plain, served = build(WIDTH), build(WIDTH)
    serve_curve(served, GRID, WIDTH)

    def kept(model: Any) -> list[tuple[str, str]]:
        modules = [(name, m) for name, m in model.named_modules() if not name.startswith("time_embedder")]
        parameters = [name for name, _ in model.named_parameters() if not name.startswith("time_embedder")]
        return [(name, "AdalnProj" if "AdalnProj" in type(m).__name__ else type(m).__name__) for name, m in modules] + [
            (name, "parameter") for name in parameters
        ]

    assert kept(served) == kept(plain)
    for ours, theirs in zip(projections(served).values(), projections(plain).values(), strict=True):
        assert ours.__dict__.keys() == theirs.__dict__.keys()
        assert ours._adaln_cache is served.adaln_cache
        assert ours._cache_name == theirs._cache_name


def test_a_projection_compiles_whole(pruned: tuple[Any, State]) -> None:
    """As upstream's: without a break in the graph, and with the same outputs."""
    model, _ = pruned
    embedding = model.time_embedder(torch.tensor([0.25, 0.9], device=DEVICE))
    for projection in projections(model).values():
        compiled = torch.compile(projection, backend="eager", fullgraph=True)
        assert torch.equal(joined(compiled(embedding)), joined(projection(embedding)))


def test_a_model_of_another_width_is_refused_and_left_alone(build: Build, tmp_path: Path) -> None:
    model = build()
    classes = [type(module) for module in model.modules()]
    with pytest.raises(H3QuantError) as caught:
        serve_curve(model, GRID, WIDTH)
    message = str(caught.value)
    assert message == (
        f"{tmp_path}/transformer/config.json: time_embed_dim=128, but the checkpoint's curve has 8 columns;"
        " set time_embed_dim to 8 there"
    )
    assert [type(module) for module in model.modules()] == classes


def test_the_table_lies_where_the_time_embedder_was(build: Build) -> None:
    model = build(WIDTH)
    model.time_embedder.to("meta")
    serve_curve(model, GRID, WIDTH)
    assert model.time_embedder.table.device.type == "meta"
