"""Counts the calls that keep the engine's attention, and says why once."""

from __future__ import annotations

from collections import Counter

from vllm_h3_quant.log import get_logger

logger = get_logger(__name__)

_calls: Counter[str] = Counter()


def note(reason: str) -> None:
    """One call that keeps the engine's attention. The first with its reason in this process is logged."""
    if not _calls[reason]:
        logger.info("8-bit attention leaves calls to the engine's attention: %s", reason)
    _calls[reason] += 1


def calls() -> dict[str, int]:
    """How many calls of this process were left to the engine's attention, by reason."""
    return dict(_calls)
