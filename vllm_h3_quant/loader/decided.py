"""What a checkpoint makes of the decision whether a linear is quantized."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from vllm_h3_quant.config.schema import H3QuantOptions
from vllm_h3_quant.loader.plan import Plan
from vllm_h3_quant.methods.scope import LinearDecision, Storage, asked_name, decide

STORED_AS_VALUES = "stored as values beside codes"
ON_THE_CURVE = "AdaLN of the curve's few inputs"


def with_checkpoint(decisions: Mapping[str, LinearDecision], plan: Plan) -> dict[str, LinearDecision]:
    """``decisions`` by the plan's names of linears, with those turned to values that the checkpoint keeps from codes.

    Linears that a quantized checkpoint holds as values stay so, and there is nothing to gain from codes of AdaLN
    projections whose inputs are a curve's.
    """
    kept = plan.kept
    found = dict(decisions)
    for name, decision in decisions.items():
        if decision.storage is not Storage.CODES:
            continue
        if plan.detection.curve and decision.role is not None and decision.role.adaln:
            found[name] = replace(decision, storage=Storage.VALUES, reason=ON_THE_CURVE)
        elif name in kept:
            found[name] = replace(decision, storage=Storage.VALUES, reason=STORED_AS_VALUES)
    return found


def decided(options: H3QuantOptions, component: str, plan: Plan) -> dict[str, LinearDecision]:
    """What ``options`` make of each linear of a component's checkpoint, by the plan's names."""
    return with_checkpoint({name: decide(options, asked_name(component, name)) for name in plan.linears}, plan)
