"""How published checkpoints code a weight. Each function returns the tensors beside and including it, and its values.

Written from the definitions, without the code that reads them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_E4M3, _LARGEST = torch.float8_e4m3fn, 448.0
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BLOCK, _NVFP4_BLOCK = 128, 16


@dataclass(frozen=True)
class Coded:
    """A weight as a file holds it.

    Attributes:
        tensors: by the last part of their names.
        values: ``(N, K)`` fp64 that the codes stand for, exact but for ConvRot's product with the matrix.
    """

    tensors: dict[str, torch.Tensor]
    values: torch.Tensor


Encode = Callable[[torch.Tensor], Coded]


def plain(weight: torch.Tensor) -> Coded:
    """The weight as it is."""
    return Coded({"weight": weight}, weight.double())


def fp8(weight: torch.Tensor, scale: torch.Tensor, stored: torch.Tensor) -> Coded:
    """e4m3 codes ``weight / scale``, where ``scale`` spreads over the weight and the file holds it as ``stored``."""
    codes = (weight.float() / scale).to(_E4M3)
    return Coded({"weight": codes, "weight_scale": stored}, codes.double() * scale.double())


def fp8_tensor(weight: torch.Tensor) -> Coded:
    """One scale ``amax / 448``."""
    scale = weight.float().abs().amax() / _LARGEST
    return fp8(weight, scale, scale)


def fp8_channel(weight: torch.Tensor) -> Coded:
    """A scale ``(N,)`` of rows."""
    scale = weight.float().abs().amax(1) / _LARGEST
    return fp8(weight, scale[:, None], scale)


def fp8_block(weight: torch.Tensor) -> Coded:
    """A scale of each 128 x 128 block, ``(N / 128, ceil(K / 128))``; of rows where 128 does not divide N."""
    rows, columns = weight.shape
    if rows % _BLOCK:
        return fp8_channel(weight)
    wide = torch.nn.functional.pad(weight.float().abs(), (0, -columns % _BLOCK))
    grid = wide.view(rows // _BLOCK, _BLOCK, -1, _BLOCK).amax((1, 3)) / _LARGEST
    scale = grid.repeat_interleave(_BLOCK, 0).repeat_interleave(_BLOCK, 1)[:, :columns]
    return fp8(weight, scale, grid)


def comfy_fp8(weight: torch.Tensor) -> Coded:
    """ComfyUI's scaled FP8: one scale, and a marker."""
    coded = fp8_tensor(weight)
    marker = _marker({"format": "float8_e4m3fn"})
    return Coded(coded.tensors | {"input_scale": torch.tensor(1.0), "comfy_quant": marker}, coded.values)


def int8_convrot(weight: torch.Tensor) -> Coded:
    """ComfyUI's ConvRot: int8 codes of ``W R`` with scales ``(N, 1)``, ``R`` in groups of neighbouring columns."""
    group = convrot_group(weight.shape[1])
    stated: dict[str, Any] = {"format": "int8_tensorwise", "per_row": True}
    turned = weight.double()
    if group:
        stated |= {"convrot": True, "convrot_groupsize": group}
        turned = (turned.unflatten(1, (-1, group)) @ _regular(group)).flatten(1)
    scale = (turned.abs().amax(1, keepdim=True) / 127).float()
    codes = (turned / scale.double()).round().clamp(-127, 127).to(torch.int8)
    values = codes.double() * scale.double()
    if group:
        values = (values.unflatten(1, (-1, group)) @ _regular(group).t()).flatten(1)
    return Coded({"weight": codes, "weight_scale": scale, "comfy_quant": _marker(stated)}, values)


def convrot_group(columns: int) -> int:
    """The largest power of 4 up to 256 that divides ``columns``, 0 for none."""
    return next((group for group in (256, 64, 16, 4) if columns % group == 0), 0)


def _regular(group: int) -> torch.Tensor:
    """The Kronecker power of the regular Hadamard matrix of order 4, orthogonal (arXiv 2512.03673)."""
    four = torch.tensor([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], dtype=torch.float64)
    matrix = four
    while len(matrix) < group:
        matrix = torch.kron(matrix, four)
    return matrix / group**0.5


def nvfp4(weight: torch.Tensor) -> Coded:
    """ModelOpt's NVFP4: two e2m1 codes a byte, the first in the low half; e4m3 scales of 16 and one fp32 of all."""
    blocks = weight.float().unflatten(1, (-1, _NVFP4_BLOCK))
    whole = weight.float().abs().amax() / (6 * _LARGEST)
    scale = (blocks.abs().amax(2) / 6 / whole).to(_E4M3)
    spread = scale.double()[:, :, None] * whole.double()
    table = torch.tensor(_E2M1, dtype=torch.float64)
    wanted = torch.where(spread > 0, blocks.double() / spread, 0.0)
    index = (wanted.abs()[..., None] - table).abs().argmin(-1)
    values = table[index] * wanted.sign() * spread
    codes = (index + 8 * (wanted < 0)).flatten(1).to(torch.uint8)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    tensors = {"weight": packed, "weight_scale": scale, "weight_scale_2": whole, "input_scale": torch.tensor(1.0)}
    return Coded(tensors, values.flatten(1))


def modelopt(encode: Encode) -> Encode:
    """``encode`` and ModelOpt's static scale of the inputs."""

    def both(weight: torch.Tensor) -> Coded:
        coded = encode(weight)
        return Coded(coded.tensors | {"input_scale": torch.tensor(1.0)}, coded.values)

    return both


def _marker(stated: dict[str, Any]) -> torch.Tensor:
    return torch.tensor(list(json.dumps(stated).encode()), dtype=torch.uint8)
