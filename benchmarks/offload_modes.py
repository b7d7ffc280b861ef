"""Ways to hold a DiT: its method, where AdaLN's weights are, and which offload of the engine is on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from vllm_h3_quant.config.names import REPLACE_VARIABLE, replaced
from vllm_h3_quant.config.schema import NAMES as OURS
from vllm_h3_quant.errors import H3QuantError, nearest

STOCK = ("fp8", "int8")
METHODS = ("bf16", *STOCK, *OURS)
ADALN = ("keep", "host")
OFFLOADS: dict[str, dict[str, bool]] = {
    "layerwise": {"enable_layerwise_offload": True},
    "dlo": {"enable_distributed_layerwise_offload": True, "dlo_use_allgather": False},
}
"""Fields of ``OmniDiffusionConfig`` by the name of an offload."""


@dataclass(frozen=True)
class Mode:
    """One way, written ``METHOD[+ADALN][@OFFLOAD]``.

    Attributes:
        method: one of :data:`METHODS`.
        adaln: one of :data:`ADALN`, for a method of ours; None for the method's own choice.
        offload: a key of :data:`OFFLOADS`, or None.
    """

    method: str
    adaln: str | None = None
    offload: str | None = None

    def __str__(self) -> str:
        adaln = f"+{self.adaln}" if self.adaln else ""
        return f"{self.method}{adaln}" + (f"@{self.offload}" if self.offload else "")

    @property
    def resident(self) -> Mode:
        """The mode with the same weights, all on the device; its outputs are to have the same bytes."""
        return replace(self, adaln="keep" if self.adaln else None, offload=None)

    @property
    def quantization(self) -> Any:
        """What ``OmniDiffusionConfig`` takes."""
        if self.adaln:
            return {"method": self.method, "adaln": self.adaln}
        return None if self.method == "bf16" else self.method

    @property
    def fields(self) -> dict[str, bool]:
        return OFFLOADS[self.offload] if self.offload else {}


ALL: dict[str, Mode] = {
    str(mode): mode
    for mode in (
        Mode(method, adaln, offload)
        for method, adaln, offload in product(METHODS, (None, *ADALN), (None, *OFFLOADS))
        if adaln is None or method in OURS
    )
}
"""By their names."""


def parse_modes(text: str, *, where: str) -> tuple[Mode, ...]:
    """The modes in a list such as ``"bf16,h3_fp8+host@dlo"``.

    Raises:
        H3QuantError: a mode that is none, twice the same, or a method of the engine that the environment serves with
            this package.
    """
    modes = []
    for part in text.split(","):
        if part not in ALL:
            close = nearest(part, ALL)
            hint = f"did you mean {close!r}? " if close else ""
            raise H3QuantError(
                f"{where}: unknown variant {part!r}; {hint}A variant is METHOD[+ADALN][@OFFLOAD] of"
                f" {', '.join(METHODS)}, for ours {', '.join(ADALN)}, and {', '.join(OFFLOADS)}"
            )
        if ALL[part].method in replaced():
            raise H3QuantError(
                f"{where}: {REPLACE_VARIABLE} serves {ALL[part].method!r} with this package: unset it to measure the"
                " engine's"
            )
        modes.append(ALL[part])
    if len(set(modes)) < len(modes):
        raise H3QuantError(f"{where}: a variant is given twice in {text!r}")
    return tuple(modes)
