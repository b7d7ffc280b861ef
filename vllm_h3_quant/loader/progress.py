"""A bar over the bytes of a component while it is loaded."""

from __future__ import annotations

from typing import Any

from tqdm.auto import tqdm

from vllm_h3_quant.loader.header import Entry
from vllm_h3_quant.loader.plan import Plan


class Progress:
    """Counts bytes and linears of one component.

    Args:
        plan: the component.
        title: what stands before the bar.
        shown: whether there is a bar at all.
    """

    def __init__(self, plan: Plan, title: str, *, shown: bool) -> None:
        self._last = {linear.due for linear in plan.linears.values()}
        self._linears = 0
        self._bar: Any = tqdm(
            total=plan.checkpoint.nbytes,
            desc=title,
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            disable=not shown,
            postfix=f"0/{len(self._last)} linears",
        )

    def done(self, entry: Entry) -> None:
        """Count a tensor that the engine has taken."""
        if entry in self._last:
            self._linears += 1
            self._bar.set_postfix_str(f"{self._linears}/{len(self._last)} linears", refresh=False)
        self._bar.update(entry.nbytes)

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()
