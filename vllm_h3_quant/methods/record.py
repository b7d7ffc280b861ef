"""The decision about a linear, on the linear: whoever loads, counts or reports reads it there."""

from __future__ import annotations

from torch.nn import Module

from vllm_h3_quant.methods.scope import LinearDecision

_DECISION = "_h3_quant_linear_decision"


def record(layer: Module, decision: LinearDecision) -> None:
    """Put ``decision`` in place of the one that ``layer`` has, if any."""
    setattr(layer, _DECISION, decision)


def decision_of(layer: Module) -> LinearDecision | None:
    """What was decided about ``layer``; None for one that no configuration of this package was asked about."""
    return getattr(layer, _DECISION, None)
