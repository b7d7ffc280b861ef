"""Which 8-bit attention the current device runs, told before any weight is read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from vllm_h3_quant.config.schema import Method
from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.kernels import attention as kernels
from vllm_h3_quant.kernels.backend import Capability, NoBackend
from vllm_h3_quant.methods.device import device_capability, device_name

AUTO = "auto"
AUTO_ERROR_BOUND: dict[Method, float] = {Method.FP8: 0.11, Method.INT8: 0.05}
"""What ``auto`` accepts as error on sharp scores. Linears in e4m3 are off by three times as much as those in INT8, and
whoever chose them wants attention to match."""


@dataclass(frozen=True)
class Choice:
    """The attention that a device runs.

    Attributes:
        kind: one of ``kernels.attention.KINDS``, or None to keep the engine's.
        kernel: the backend's name; empty without a kind.
        why: why this one; empty where it was asked for by name.
    """

    kind: str | None
    kernel: str = ""
    why: str = ""


@cache
def choice_for(asked: str, method: Method) -> Choice:
    """What ``attention=asked`` (a kind or ``auto``) means beside linears in ``method`` on this process's device.

    Raises:
        H3QuantError: the device cannot run the kind; the message names it, each backend's reason and a
            kind that the device does run.
    """
    capability = device_capability()
    kind, why = kernels.choose(capability, AUTO_ERROR_BOUND[method]) if asked == AUTO else (asked, "")
    if kind is None:
        return Choice(None, why=why)
    try:
        return Choice(kind, kernels.select(kind, capability).name, why)
    except NoBackend as error:
        sm = "" if capability is None else f" (sm_{capability[0]}{capability[1]})"
        others = [other for other in kernels.KINDS if other != kind and _serves(other, capability)]
        instead = f"attention='{others[0]}'" if others else "attention='none'"
        raise H3QuantError(
            f"attention='{kind}' cannot run on {device_name()}{sm}: {error}; use {instead} instead"
        ) from None


def _serves(kind: str, capability: Capability | None) -> bool:
    try:
        kernels.select(kind, capability)
    except NoBackend:
        return False
    return True
