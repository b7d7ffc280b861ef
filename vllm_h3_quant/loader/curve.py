"""Pruned checkpoints: a curve over timesteps in place of the time embedder, and whether it stands for it.

A full checkpoint computes an AdaLN projection as ``m(t) = W_full @ g(t) + bias``, where
``g(t) = silu(time_embedder(t))`` and ``t = 1 - sigma`` lies in [0, 1]. A pruned one holds a table of points of a curve,
row ``k`` for ``t = k / (grid - 1)``, and ``m(t) = W_pruned @ c(t) + bias`` with ``c`` linear between two rows. Nothing
in a pruned file tells whether the two agree, and files that do not were published.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import linear, silu

from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.loader.architecture import Architecture
from vllm_h3_quant.loader.formats.pruned import CURVE
from vllm_h3_quant.loader.header import FLOATS
from vllm_h3_quant.loader.plan import Plan
from vllm_h3_quant.loader.reader import mapped
from vllm_h3_quant.loader.stored import StoredLinear

COSINE = 0.999
"""Least direction cosine of a projection at each timestep: an error across of 4.5%.

Rank 8 costs next to nothing: over [0, 1] the sinusoids have frequencies of at most 1 and ``g`` is smooth, so that its
singular values fall by about ten each; on random time embedders of the tiny and the real width
``1 - cosine`` is 1e-13, and 1e-8 with weights eight and four times as large. What remains is how ``W_pruned`` is
stored. With relative errors of rms ``r`` in its numbers, ``1 - cosine = r^2 / 2``: bf16 1.4e-6, e4m3 3.5e-4
(r = 2^-4 * 3^-1/2 * 0.735 = 2.6%), INT8 with one scale a tensor 5e-5. The limit is about three times e4m3's.
AdaLN's gate multiplies what a block adds to the residual stream, its scale and shift what the block reads, so that an
error of 5% here is one of about 5% of a block's update at every token: what e4m3 linears (6.7%) cost anyway.
The published broken files have 0.07 to 0.63.
"""

RATIO = 0.02
"""How far from 1 the magnitude ratio may be at each timestep.

Errors of single numbers average out in a norm: by e4m3 it moves about 0.1%, and a wrong scale moves it by factors
(10 to 60 in the published broken files). With :data:`COSINE`, 2% keeps the error of a projection below 5%.
"""

CHANGE = 0.05
"""Largest error of what changes over time, relative to that change.

``m(t)`` is nearly constant: half of the sinusoids hardly move while ``t`` goes from 0 to 1, and a curve that stands
still has cosines above 0.99 and ratios within 1.5% on random time embedders. Taken relative to the change alone, such
a curve is wrong by 100%, while rounding of ``W_pruned`` still shows with its ``r`` (2.6% for e4m3). The limit is the
one that :data:`COSINE` and :data:`RATIO` put on the whole: ``(0.045^2 + 0.02^2)^1/2``.
"""

UNSEEN = 2.0**-8
"""A change below this share of the projection is lost in the engine's bf16 outputs: :data:`CHANGE` is relative to the
share then, so that rounding is not taken for an error in a projection that hardly depends on time."""

_ROWS = 8192
"""Rows of a projection at a time: 90 MB of weights of the real width in fp32, 34 MB of outputs at 1025 timesteps."""


@dataclass(frozen=True)
class LayerCurve:
    """One AdaLN projection of a pruned checkpoint against the full one's.

    Attributes:
        name: the model's linear.
        cosine_min: least direction cosine over the timesteps.
        cosine_median: their median.
        ratio_min: least magnitude of the pruned over the full output.
        ratio_median: their median.
        ratio_max: the largest.
        change_error: error of the change over time, relative to it.
        bias_difference: largest difference of the biases; 0 where the pruned file holds the full one's, as rounded to
            its own dtype.
        worst: the row of the table with the least cosine.
    """

    name: str
    cosine_min: float
    cosine_median: float
    ratio_min: float
    ratio_median: float
    ratio_max: float
    change_error: float
    bias_difference: float
    worst: int

    @property
    def good(self) -> bool:
        """Whether all is within the limits; a NaN is not."""
        ratios = self.ratio_min >= 1 - RATIO and self.ratio_max <= 1 + RATIO
        return self.cosine_min >= COSINE and ratios and self.change_error <= CHANGE


@dataclass(frozen=True)
class CurveReport:
    """A pruned checkpoint against a full one.

    Attributes:
        pruned: where the pruned one is.
        full: where the full one is.
        grid: rows of the table.
        width: its columns.
        compared: how many of its rows were compared.
        layers: every AdaLN projection, in the model's order.
    """

    pruned: Path
    full: Path
    grid: int
    width: int
    compared: int
    layers: tuple[LayerCurve, ...]

    @property
    def good(self) -> bool:
        """Whether the curve stands for the time embedder in every projection."""
        return all(layer.good for layer in self.layers)

    @property
    def verdict(self) -> str:
        """One line: the limits that hold, or the projection that is furthest off."""
        over = f"{self.compared} of {self.grid} timesteps"
        bad = [layer for layer in self.layers if not layer.good]
        if not bad:
            return (
                f"the curve matches in all {len(self.layers)} AdaLN projections over {over}: direction cosine at least"
                f" {COSINE}, magnitude within {RATIO:.0%}, change over time within {CHANGE:.0%}"
            )
        worst = min(bad, key=lambda layer: -math.inf if math.isnan(layer.cosine_min) else layer.cosine_min)
        return (
            f"the curve does NOT match: {len(bad)} of {len(self.layers)} AdaLN projections are off over {over};"
            f" {worst.name} has direction cosine {worst.cosine_min:.4f} at row {worst.worst} of the table, magnitude"
            f" ratio {worst.ratio_min:.4g} to {worst.ratio_max:.4g}, change over time wrong by {worst.change_error:.1%}"
        )


def curve_shape(plan: Plan) -> tuple[int, int]:
    """Rows and columns of a pruned checkpoint's table.

    Raises:
        H3QuantError: the checkpoint has no table, or one that is no curve.
    """
    entry = plan.plain.get(CURVE)
    if entry is None:
        raise H3QuantError(f"{plan.checkpoint.place}: holds no {CURVE!r}, so it is not pruned to a curve")
    shape = entry.shape
    if len(shape) != 2 or shape[0] < 2 or shape[1] < 1 or entry.dtype not in FLOATS:
        raise H3QuantError(
            f"{entry.file}: tensor {entry.name!r} is {entry.dtype} {list(shape)}, no curve; expected F32 [1025, 8]:"
            " convert the checkpoint again"
        )
    return shape[0], shape[1]


def refuse_unverified(plan: Plan, allow: bool) -> None:
    """Stop before a curve is served that may stand for nothing.

    Args:
        plan: a component of any format.
        allow: the configuration's ``allow_unverified_curve``.

    Raises:
        H3QuantError: the checkpoint is pruned to a curve and ``allow`` is false.
    """
    if plan.detection.curve and not allow:
        place = plan.checkpoint.place
        raise H3QuantError(
            f"{place}: is pruned to a curve ({CURVE!r}), and published pruned files were found with direction cosine"
            f" 0.07-0.63 against the full weights, which collapses the clip to a still: compare it by"
            f" `vllm-h3-quant check {place} --against FULL`, then set allow_unverified_curve: true"
        )


def compare(pruned: Plan, full: Plan, device: torch.device, *, every: int = 1) -> CurveReport:
    """Compare ``W_pruned @ table[k]`` with ``W_full @ silu(time_embedder(k / (grid - 1)))`` in fp32.

    One projection is read at a time, and multiplied in pieces of its rows. A bias is the same in both files and stays
    out; where it is not, its difference counts as the pruned one's output.

    Args:
        pruned: a checkpoint with a curve, of values or codes.
        full: the same model unpruned and unquantized.
        device: where products are computed.
        every: compare every so many rows of the table, and the last.

    Raises:
        H3QuantError: a checkpoint that cannot be loaded, is of the wrong kind, or is of another model.
    """
    _check_pair(pruned, full)
    if every < 1:
        raise H3QuantError(f"every={every} rows of the table cannot be compared; the nearest is 1")
    grid, width = curve_shape(pruned)
    rows = sorted({*range(0, grid, every), grid - 1})
    index = torch.tensor(rows)
    table = mapped(pruned.plain[CURVE]).float()[index].to(device)
    inputs = _activations(full, (index.float() / (grid - 1)).to(device))
    layers = []
    for name in _adaln(_architecture(pruned)):
        bias = _bias_difference(pruned, full, name)
        sums = _Sums(len(rows))
        for first, count in _pieces(pruned.linears[name].shape[0]):
            want = linear(inputs, _weight(full.linears[name], first, count, device))
            difference = bias[first : first + count].to(device)
            got = linear(table, _weight(pruned.linears[name], first, count, device), difference)
            sums.add(want, got)
        layers.append(sums.layer(name, float(bias.abs().max()), rows))
    return CurveReport(pruned.checkpoint.place, full.checkpoint.place, grid, width, len(rows), tuple(layers))


class _Sums:
    """Sums over the outputs of a projection, for each timestep and for what changes between them."""

    def __init__(self, timesteps: int) -> None:
        self.both, self.full, self.pruned = torch.zeros(3, timesteps, dtype=torch.float64)
        self.change = self.error = 0.0

    def add(self, full: torch.Tensor, pruned: torch.Tensor) -> None:
        """Take in some outputs at all timesteps, ``(timesteps, outputs)``."""
        self.both += (full * pruned).sum(1).cpu()
        self.full += full.square().sum(1).cpu()
        self.pruned += pruned.square().sum(1).cpu()
        self.change += _spread(full)
        self.error += _spread(pruned - full)

    def layer(self, name: str, bias: float, rows: list[int]) -> LayerCurve:
        """What the sums say of the whole projection; two that are zero agree."""
        norms = (self.full * self.pruned).sqrt()
        neither = (self.full == 0) & (self.pruned == 0)
        cosine = torch.where(neither, 1.0, torch.where(norms == 0, 0.0, self.both / norms))
        ratio = torch.where(neither, 1.0, (self.pruned / self.full).sqrt())
        floor = max(self.change, UNSEEN**2 * float(self.full.sum()))
        change = math.sqrt(self.error / floor) if floor else math.inf if self.error else 0.0
        return LayerCurve(
            name,
            cosine_min=float(cosine.min()),
            cosine_median=float(cosine.median()),
            ratio_min=float(ratio.min()),
            ratio_median=float(ratio.median()),
            ratio_max=float(ratio.max()),
            change_error=change,
            bias_difference=bias,
            worst=rows[int(cosine.argmin())],
        )


def _spread(values: torch.Tensor) -> float:
    """Sum of squares about the mean over timesteps, the first dimension."""
    return float((values - values.mean(0)).square().sum())


def _activations(full: Plan, timesteps: torch.Tensor) -> torch.Tensor:
    """``silu(time_embedder(t))``, ``(timesteps, time_embed_dim)`` fp32, as the engine's ``MiniMaxH3TimeEmbedder``."""

    def read(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        stored = full.linears[f"time_embedder.{name}"]
        weight = _weight(stored, 0, stored.shape[0], timesteps.device)
        return weight, mapped(full.plain[f"time_embedder.{name}.bias"]).to(timesteps.device, torch.float32)

    weight, bias = read("proj_in")
    half = weight.shape[1] // 2
    index = torch.arange(half, dtype=torch.float32, device=timesteps.device)
    angles = timesteps[:, None] * torch.exp(-math.log(10000.0) * index / half)
    hidden = silu(linear(torch.cat([angles.cos(), angles.sin()], dim=-1), weight, bias))
    return silu(linear(hidden, *read("proj_out")))


def _weight(stored: StoredLinear, first: int, count: int, device: torch.device) -> torch.Tensor:
    values = torch.empty(count, stored.shape[1], dtype=torch.float32, device=device)
    stored.fill(values, first)
    return values


def _pieces(rows: int) -> Iterator[tuple[int, int]]:
    return ((first, min(_ROWS, rows - first)) for first in range(0, rows, _ROWS))


def _bias_difference(pruned: Plan, full: Plan, name: str) -> torch.Tensor:
    ours, theirs = (mapped(plan.plain[f"{name}.bias"]) for plan in (pruned, full))
    if torch.equal(ours, theirs.to(ours.dtype)):
        return torch.zeros(ours.shape)
    return ours.float() - theirs.float()


def _adaln(architecture: Architecture) -> list[str]:
    suffix = ".adaln_proj.linear.weight"
    names = architecture.tensors(curve=True)
    return [name.removesuffix(".weight") for name in names if name.endswith(suffix)]


def _architecture(plan: Plan) -> Architecture:
    if plan.architecture is None:
        raise H3QuantError(f"{plan.checkpoint.place}: is a text encoder; give the transformer's folder")
    return plan.architecture


def _check_pair(pruned: Plan, full: Plan) -> None:
    ours, theirs = _architecture(pruned), _architecture(full)
    curve_shape(pruned)
    place = full.checkpoint.place
    if full.detection.curve or full.detection.quantized:
        raise H3QuantError(
            f"{place}: is {full.detection.name}, and a curve is compared with full-precision weights alone; give the"
            " transformer's folder of the bf16 release"
        )
    pruned.check()
    full.check()
    for key in ("num_layers", "adaln_out_features", "final_adaln_out_features"):
        if getattr(ours, key) != getattr(theirs, key):
            raise H3QuantError(
                f"{place}: {key} is {getattr(theirs, key)}, but {getattr(ours, key)} in {pruned.checkpoint.place}; give"
                " the full checkpoint that was pruned"
            )
