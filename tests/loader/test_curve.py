"""Pruned checkpoints against the full one: honest curves pass, damaged ones do not, none is served unseen."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import linear, silu

from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.loader import curve
from vllm_h3_quant.loader.architecture import Architecture
from vllm_h3_quant.loader.checkpoint import open_checkpoint
from vllm_h3_quant.loader.curve import CurveReport, LayerCurve, compare, curve_shape, refuse_unverified
from vllm_h3_quant.loader.formats.pruned import CURVE
from vllm_h3_quant.loader.plan import Plan, plan_transformer
from vllm_h3_quant.tiny_h3.spec import TinyH3
from vllm_h3_quant.tiny_h3.tensors import RandomTensors
from vllm_h3_quant.tiny_h3.transformer import transformer_config, transformer_state

GRID, WIDTH = 1025, 8
CPU = torch.device("cpu")
SPEC = TinyH3(layers=2, refiner_layers=1, hidden=64, ffn=64)
State = dict[str, torch.Tensor]
Edit = Callable[[State], None]


def embedder(state: State, timesteps: torch.Tensor) -> torch.Tensor:
    """silu of MiniMax-H3's time embedder, in fp64."""
    w1, b1, w2, b2 = (state[f"time_embedder.{n}"].double() for n in PARTS)
    half = w1.shape[1] // 2
    angles = timesteps.double()[:, None] * 10000.0 ** -(torch.arange(half, dtype=torch.float64) / half)
    return silu(linear(silu(linear(torch.cat([angles.cos(), angles.sin()], 1), w1, b1)), w2, b2))


PARTS = ("proj_in.weight", "proj_in.bias", "proj_out.weight", "proj_out.bias")


def pruned_state(full: State) -> State:
    """G = U S V^T over the grid, table = G V8, W_pruned = W V8, in bf16 as the full weights are."""
    points = embedder(full, torch.arange(GRID) / (GRID - 1))
    basis = torch.linalg.svd(points, full_matrices=False).Vh[:WIDTH].T
    state = {name: tensor for name, tensor in full.items() if not name.startswith("time_embedder.")}
    for name in [name for name in state if name.endswith("adaln_proj.linear.weight")]:
        state[name] = (full[name].double() @ basis).bfloat16()
    return state | {CURVE: (points @ basis).float()}


def quantize(state: State, name: str, dtype: torch.dtype) -> None:
    """Codes with one scale a tensor, as ComfyUI's FP8 files have them, or one a row, as its INT8 files."""
    weight = state[f"{name}.weight"].float()
    if dtype is torch.int8:
        scale = weight.abs().amax(1, keepdim=True) / 127
        marker = json.dumps({"format": "int8_tensorwise"}).encode()
        state[f"{name}.comfy_quant"] = torch.frombuffer(bytearray(marker), dtype=torch.uint8)
        codes = (weight / scale).round().to(torch.int8)
    else:
        scale = weight.abs().max() / torch.finfo(dtype).max
        codes = (weight / scale).to(dtype)
    state |= {f"{name}.weight": codes, f"{name}.weight_scale": scale}


@pytest.fixture(scope="module")
def full_state() -> State:
    return transformer_state(SPEC, RandomTensors(0))


@pytest.fixture(scope="module")
def full(full_state: State, tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return written(full_state, tmp_path_factory.mktemp("full"), None)


@pytest.fixture(scope="module")
def honest(full_state: State) -> State:
    return pruned_state(full_state)


@pytest.fixture
def pruned(honest: State, tmp_path: Path) -> Callable[..., Plan]:
    """``pruned(edit)``: the plan of the honest pruned checkpoint, edited, in a folder of its own."""
    number = itertools.count()

    def pruned(edit: Edit = lambda state: None, width: int | None = WIDTH) -> Plan:
        state = {name: tensor.clone() for name, tensor in honest.items()}
        edit(state)
        folder = tmp_path / f"pruned-{next(number)}"
        folder.mkdir()
        return written(state, folder, width)

    return pruned


def written(state: State, folder: Path, width: int | None) -> Plan:
    save_file(state, folder / "model.safetensors")
    config = transformer_config(SPEC) | ({} if width is None else {"time_embed_dim": width})
    (folder / "config.json").write_text(json.dumps(config))
    return plan_transformer(open_checkpoint(folder))


def in_adaln(change: Callable[[State, str], None]) -> Edit:
    """An edit of every AdaLN projection, by its name."""

    def edit(state: State) -> None:
        for name in [name for name in state if name.endswith("adaln_proj.linear.weight")]:
            change(state, name.removesuffix(".weight"))

    return edit


def test_an_honest_curve_is_good_in_every_projection(full: Plan, pruned: Callable[..., Plan]) -> None:
    report = compare(pruned(), full, CPU)
    assert report.good
    assert (report.grid, report.width, report.compared) == (GRID, WIDTH, GRID)
    names = [*(f"blocks.{i}.adaln_proj.linear" for i in range(SPEC.layers)), "final_layer.adaln_proj.linear"]
    assert [layer.name for layer in report.layers] == names
    # A number rounded to bf16 is off by at most 2^-8 of itself, and 1 - cosine is half the square of their rms.
    rounding = 2**-8
    for layer in report.layers:
        assert 1 - layer.cosine_min < rounding**2 / 2
        assert abs(layer.ratio_min - 1) < rounding
        assert abs(layer.ratio_max - 1) < rounding
        assert layer.change_error < rounding
        assert layer.bias_difference == 0
    assert "matches in all 3 AdaLN projections over 1025 of 1025 timesteps" in report.verdict


@pytest.mark.parametrize(
    ("dtype", "rms"),
    [
        # e4m3: half a step of 2^-3, over sqrt(3), averaged over mantissas (0.735): 2.65%.
        (torch.float8_e4m3fn, 2**-4 * 3**-0.5 * 0.735),
        # Steps of 1/127 of a row's largest of 8: uniform within half a step, and the largest of 8 normal numbers is
        # about 1.4 to 2 times their rms.
        (torch.int8, 2.0 / 127 * 12**-0.5),
    ],
    ids=["fp8", "int8"],
)
def test_codes_are_decoded_and_their_rounding_is_accepted(
    full: Plan, pruned: Callable[..., Plan], dtype: torch.dtype, rms: float
) -> None:
    report = compare(pruned(in_adaln(lambda state, name: quantize(state, name, dtype))), full, CPU)
    assert report.good
    for layer in report.layers:
        # 1 - cosine = rms^2 / 2 of independent errors. 1.5 for the few hundred rows that they are averaged over, and
        # for the first column, whose size alone decides.
        assert 1 - layer.cosine_min < 1.5 * rms**2 / 2
        assert layer.cosine_min < 1 - 0.2 * rms**2 / 2  # codes, not the values they were made of


def random_table(state: State) -> None:
    table = state[CURVE]
    state[CURVE] = torch.randn(table.shape, generator=torch.Generator().manual_seed(1)) * table.std()


def tenfold(state: State) -> None:
    state[CURVE] *= 10


def standing_still(state: State) -> None:
    state[CURVE] = state[CURVE].mean(0, keepdim=True).repeat(GRID, 1)


def half_the_change(state: State) -> None:
    mean = state[CURVE].mean(0, keepdim=True)
    state[CURVE] = mean + 0.5 * (state[CURVE] - mean)


def one_row(state: State) -> None:
    state[CURVE][517] = state[CURVE][517].flip(0)


def one_nan(state: State) -> None:
    state[CURVE][3, 0] = math.nan


def reversed_time(state: State) -> None:
    state[CURVE] = state[CURVE].flip(0)


def one_layer_scaled(state: State) -> None:
    state["blocks.1.adaln_proj.linear.weight"] *= 1.03


def other_bias(state: State) -> None:
    state["final_layer.adaln_proj.linear.bias"] += 1


@pytest.mark.parametrize(
    "damage",
    [
        random_table,
        tenfold,
        standing_still,
        half_the_change,
        one_row,
        one_nan,
        reversed_time,
        one_layer_scaled,
        other_bias,
    ],
)
def test_a_damaged_curve_is_bad(full: Plan, pruned: Callable[..., Plan], damage: Edit) -> None:
    report = compare(pruned(damage), full, CPU)
    assert not report.good
    assert "does NOT match" in report.verdict
    assert "\n" not in report.verdict


def test_the_verdict_names_what_is_off(full: Plan, pruned: Callable[..., Plan]) -> None:
    report = compare(pruned(one_layer_scaled), full, CPU)
    assert [layer.good for layer in report.layers] == [True, False, True]
    assert "1 of 3" in report.verdict
    assert "blocks.1.adaln_proj.linear" in report.verdict
    row = compare(pruned(one_row), full, CPU)
    assert {layer.worst for layer in row.layers} == {517}


def test_the_measures_are_those_of_fp64(
    full: Plan, full_state: State, honest: State, pruned: Callable[..., Plan]
) -> None:
    """Against the definition, for a curve that is off by several percent, over every 100th row and the last."""

    def noisy(state: State) -> None:
        noise = torch.randn(state[CURVE].shape, generator=torch.Generator().manual_seed(2))
        state[CURVE] *= 1 + 0.05 * noise

    plan = pruned(noisy)
    noisy(state := {**honest, CURVE: honest[CURVE].clone()})
    name = "final_layer.adaln_proj.linear"
    rows = torch.tensor([*range(0, GRID, 100), GRID - 1])
    want = embedder(full_state, rows / (GRID - 1)) @ full_state[f"{name}.weight"].double().T
    got = state[CURVE][rows].double() @ state[f"{name}.weight"].double().T
    cosine = torch.nn.functional.cosine_similarity(want, got, dim=1)
    ratio = got.norm(dim=1) / want.norm(dim=1)
    change, off = want - want.mean(0), (got - want) - (got - want).mean(0)

    layer = compare(plan, full, CPU, every=100).layers[-1]
    # Sums of 128 products in fp32, each within 128 * 2^-24 = 7.6e-6 of the terms' magnitudes, and as little of angles;
    # the change is about 2^-4 of the whole, of which its error is relative.
    near = {"rel": 1e-5, "abs": 1e-5}
    assert layer.cosine_min == pytest.approx(float(cosine.min()), **near)
    assert layer.cosine_median == pytest.approx(float(cosine.median()), **near)
    assert layer.ratio_min == pytest.approx(float(ratio.min()), **near)
    assert layer.ratio_median == pytest.approx(float(ratio.median()), **near)
    assert layer.ratio_max == pytest.approx(float(ratio.max()), **near)
    assert layer.change_error == pytest.approx(float(off.norm() / change.norm()), rel=16e-5)
    assert layer.worst == int(rows[cosine.argmin()])


def test_pieces_of_rows_give_what_all_rows_give(
    full: Plan, pruned: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = pruned(half_the_change)
    whole = compare(plan, full, CPU, every=64)
    monkeypatch.setattr(curve, "_ROWS", 100)  # divides neither 1152 nor 128 rows
    for one, other in zip(whole.layers, compare(plan, full, CPU, every=64).layers, strict=True):
        for field in dataclasses.fields(LayerCurve):
            # Only the order of fp32 sums over at most 1152 rows differs.
            expected = getattr(one, field.name)
            near = pytest.approx(expected, rel=1e-5) if isinstance(expected, float) else expected
            assert getattr(other, field.name) == near


def test_a_stride_counts_what_it_compares_and_takes_the_last_row(full: Plan, pruned: Callable[..., Plan]) -> None:
    def last(state: State) -> None:
        state[CURVE][-1] = 0

    assert not compare(pruned(last), full, CPU, every=1000).good
    report = compare(pruned(one_row), full, CPU, every=100)
    assert report.good  # row 517 is none of them
    assert report.compared == 12
    assert "12 of 1025" in report.verdict


def test_a_bias_in_another_dtype_is_the_same_bias(full: Plan, pruned: Callable[..., Plan]) -> None:
    def half(state: State, name: str) -> None:
        state[f"{name}.bias"] = state[f"{name}.bias"].half()

    assert {layer.bias_difference for layer in compare(pruned(in_adaln(half)), full, CPU, every=512).layers} == {0.0}
    layers = compare(pruned(other_bias), full, CPU, every=512).layers
    # Biases have a deviation of 0.5: below 2, a sum is within 2^-8 in bf16, and below 4 within 2^-7.
    assert [layer.bias_difference for layer in layers] == pytest.approx([0, 0, 1], abs=2**-7)


def test_a_projection_that_is_zero_in_both_agrees(
    full_state: State, honest: State, tmp_path: Path, pruned: Callable[..., Plan]
) -> None:
    def zero(state: State) -> None:
        state["blocks.0.adaln_proj.linear.weight"].zero_()

    plain = {name: tensor.clone() for name, tensor in full_state.items()}
    zero(plain)
    (tmp_path / "full").mkdir()
    full = written(plain, tmp_path / "full", None)
    assert compare(pruned(zero), full, CPU, every=512).good
    assert not compare(pruned(), full, CPU, every=512).good


@pytest.mark.parametrize(("share", "good"), [(1e-5, True), (1e-2, False)])
def test_a_change_too_small_for_bf16_need_not_be_met(share: float, good: bool) -> None:
    """A projection that changes by a share of itself, against one that stands still: relative to 2^-8 below that."""
    change = torch.linspace(-1, 1, 9)[:, None] * torch.ones(1, 64)
    sums = curve._Sums(9)
    sums.add(1 + share * change, torch.ones(9, 64))
    assert sums.layer("blocks.0.adaln_proj.linear", 0.0, list(range(9))).good is good


SOUND = LayerCurve("blocks.0.adaln_proj.linear", 0.9995, 1, 1, 1, 1, 0, 0, 0)


@pytest.mark.parametrize(
    "field", ["cosine_min", "ratio_min", "ratio_max", "change_error"], ids=lambda field: f"nan-{field}"
)
def test_nan_is_not_good(field: str) -> None:
    assert SOUND.good
    layer = replace(SOUND, **{field: math.nan})
    assert not layer.good
    assert "does NOT match" in CurveReport(Path("a"), Path("b"), 2, 8, 2, (SOUND, layer)).verdict


def test_what_cannot_be_compared_is_refused(
    full: Plan, full_state: State, pruned: Callable[..., Plan], tmp_path: Path
) -> None:
    plan = pruned()
    with pytest.raises(H3QuantError, match=r"holds no 'adaln_t_table'"):
        compare(full, full, CPU)
    with pytest.raises(H3QuantError, match=r"is MiniMax-H3 bf16, pruned to a curve, .* bf16 release"):
        compare(plan, plan, CPU)
    with pytest.raises(H3QuantError, match="every=0"):
        compare(plan, full, CPU, every=0)
    codes = dict(full_state)
    quantize(codes, "blocks.0.attn.out_proj", torch.float8_e4m3fn)
    (tmp_path / "codes").mkdir()
    with pytest.raises(H3QuantError, match="is ComfyUI FP8 scaled"):
        compare(plan, written(codes, tmp_path / "codes", None), CPU)
    assert full.architecture is not None
    other = replace(full, architecture=replace(full.architecture, num_layers=7))
    with pytest.raises(H3QuantError, match=r"num_layers is 7, but 2 in .* that was pruned"):
        compare(plan, other, CPU)
    lacking = pruned(lambda state: state.__delitem__("blocks.1.adaln_proj.linear.bias"))
    with pytest.raises(H3QuantError, match=r"lacks 'blocks.1.adaln_proj.linear.bias'"):
        compare(lacking, full, CPU)


@pytest.mark.parametrize(
    ("table", "arrives"),
    [
        (torch.zeros(GRID * WIDTH), r"F32 \[8200\]"),
        (torch.zeros(1, WIDTH), r"F32 \[1, 8\]"),
        (torch.zeros(GRID, WIDTH, dtype=torch.int8), r"I8 \[1025, 8\]"),
    ],
)
def test_a_table_that_is_no_curve_is_refused(pruned: Callable[..., Plan], table: torch.Tensor, arrives: str) -> None:
    with pytest.raises(H3QuantError, match=rf"'adaln_t_table' is {arrives}, no curve; expected F32 \[1025, 8\]"):
        curve_shape(pruned(lambda state: state.update({CURVE: table})))


def test_the_width_is_the_tables(full: Plan, pruned: Callable[..., Plan]) -> None:
    """A pruned file often comes alone, or beside the full model's configuration."""
    assert compare(pruned(width=None), full, CPU, every=512).good


def test_an_unverified_curve_is_served_on_request_alone(full: Plan, pruned: Callable[..., Plan]) -> None:
    plan = pruned()
    assert curve_shape(plan) == (GRID, WIDTH)
    refuse_unverified(full, allow=False)
    refuse_unverified(plan, allow=True)
    with pytest.raises(H3QuantError) as caught:
        refuse_unverified(plan, allow=False)
    message = str(caught.value)
    place = plan.checkpoint.place
    assert "\n" not in message
    for part in (f"check {place} --against FULL", "allow_unverified_curve: true", "0.07-0.63", "still"):
        assert part in message


def test_defaults_are_the_real_models() -> None:
    """51 projections of the real sizes are what is compared on MiniMax-H3."""
    names = curve._adaln(Architecture(time_embed_dim=WIDTH))
    assert len(names) == 51
    assert names[-1] == "final_layer.adaln_proj.linear"
