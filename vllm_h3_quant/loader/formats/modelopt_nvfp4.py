"""ModelOpt's NVFP4: packed e2m1 codes, e4m3 scales of 16 columns, and one fp32 scale of all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.loader.coding import Coding
from vllm_h3_quant.loader.formats import comfy
from vllm_h3_quant.loader.formats.base import Format, Layout, Signs, of_transformer
from vllm_h3_quant.loader.formats.beside import GLOBAL_SCALE, Beside, Found, positive, scale_of
from vllm_h3_quant.loader.reader import mapped

BLOCK = 16
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of the 16 codes of e2m1 (OCP Microscaling Formats 1.0)."""

_PACKED = "U8"
_NAN = 0x7F
"""e4m3's code of NaN; those above have a sign."""


@dataclass(frozen=True)
class NvFp4(Coding):
    """Two e2m1 codes a byte, the first in the low half: ``W[n, k] = e2m1 * scale[n, k // 16] * global_scale``.

    Attributes:
        scale: ``(N, K / 16)`` e4m3 on the host.
        global_scale: fp32.
    """

    scale: torch.Tensor = field(repr=False)
    global_scale: float

    @property
    def describe(self) -> str:
        return "NVFP4 codes"

    def columns(self, stored: int) -> int:
        return 2 * stored

    def decode(self, raw: torch.Tensor, row: int) -> torch.Tensor:
        table = torch.tensor(E2M1, dtype=torch.float32, device=raw.device)
        halves = torch.stack((raw & 0xF, raw >> 4), dim=-1).reshape(raw.shape[0], -1)
        scale = self.scale[row : row + raw.shape[0]].to(raw.device).float() * self.global_scale
        return table[halves.int()] * scale.repeat_interleave(BLOCK, dim=1)


class ModelOptNvFp4(Format):
    """Packed codes in some linears; 8-bit codes or values in others."""

    name = "ModelOpt NVFP4"

    @classmethod
    def told(cls, signs: Signs, layout: Layout | None) -> Format | None:
        return cls(layout) if of_transformer(layout) and _PACKED in signs.dtypes else None

    def coding_of(self, found: Found, beside: Beside, metadata: Mapping[str, str]) -> Coding:
        return _packed(found, beside) if found.entry.dtype == _PACKED else comfy.coded(found, beside)


def _packed(found: Found, beside: Beside) -> NvFp4:
    entry, scale, global_scale = found.entry, scale_of(found, beside), beside.get(GLOBAL_SCALE)
    rows, stored = entry.shape
    if global_scale is None or math.prod(global_scale.shape) != 1:
        raise H3QuantError(f"{entry.file}: tensor {entry.name!r} holds NVFP4 codes without one {GLOBAL_SCALE}")
    if scale.dtype != "F8_E4M3" or scale.shape != (rows, 2 * stored // BLOCK) or 2 * stored % BLOCK:
        raise H3QuantError(
            f"{scale.file}: tensor {scale.name!r} is {scale.dtype} {list(scale.shape)}; NVFP4 codes {[rows, stored]}"
            f" take F8_E4M3 {[rows, 2 * stored // BLOCK]}"
        )
    numbers = mapped(scale)
    bad = numbers.view(torch.uint8) >= _NAN
    if bad.any():
        raise H3QuantError(
            f"{scale.file}: tensor {scale.name!r} holds the scale {numbers[bad][0].item()} at"
            f" {bad.nonzero()[0].tolist()}; a scale is finite and not negative"
        )
    return NvFp4(numbers, float(positive(global_scale, 448.0 * 6.0)))
