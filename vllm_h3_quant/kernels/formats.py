"""The 8-bit code formats."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class CodeFormat:
    """A symmetric 8-bit format: ``value = code * scale`` with ``|code| <= max``."""

    name: str
    dtype: torch.dtype
    max: float


FP8 = CodeFormat("fp8", torch.float8_e4m3fn, 448.0)
INT8 = CodeFormat("int8", torch.int8, 127.0)

BY_NAME: dict[str, CodeFormat] = {fmt.name: fmt for fmt in (FP8, INT8)}
