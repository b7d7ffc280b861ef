"""Keeps codes and scales in their dtype when a module around them is cast.

``module.to(torch.bfloat16)`` casts every floating-point parameter. For e4m3 codes and fp32 scales
that is not a change of precision but of meaning.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch.nn import Module


def keep_dtypes(layer: Module) -> None:
    """Make moves of ``layer`` keep each parameter's dtype: ``.to(device)`` works, casts are ignored."""
    layer.__dict__["_apply"] = MethodType(_apply_keeping_dtypes, layer)


def _apply_keeping_dtypes(layer: Module, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    def keep(tensor: torch.Tensor) -> torch.Tensor:
        moved = fn(tensor)
        return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

    return type(layer)._apply(layer, keep, *args, **kwargs)
