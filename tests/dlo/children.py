"""Processes beside a test's own, from a clean one: a fork of the test's would have locks of threads that it lacks."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch"])

LIMIT = 120
"""Seconds that a process may take."""


def run(work: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> None:
    """Call a function of a module in one process for each tuple, all at the same time, and wait for them."""
    children = [_CONTEXT.Process(target=work, args=one) for one in arguments]
    for child in children:
        child.start()
    try:
        for child in children:
            child.join(LIMIT)
        assert [child.exitcode for child in children] == [0] * len(children)
    finally:
        for child in children:
            child.kill()
            child.join()
