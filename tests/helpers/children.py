"""Processes beside a test's own, from a clean one: a fork of the test's would have locks of threads that it lacks.

Without GPUs the clean one has imported the engine, which takes ten seconds, once for all of them.
"""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable, Sequence
from typing import Any

import torch

_ENGINE = "vllm_omni.diffusion.models.minimax_h3.pipeline_minimax_h3"
_CONTEXT = multiprocessing.get_context("forkserver")
# A fork cannot use CUDA where an import has initialized it.
_CONTEXT.set_forkserver_preload(["torch"] if torch.cuda.is_available() else ["torch", _ENGINE])

LIMIT = 120
"""Seconds that a process may take, the first of all after that import."""


def run(work: Callable[..., None], arguments: Sequence[tuple[Any, ...]], *, limit: float = LIMIT) -> None:
    """Call a function of a module in one process for each tuple, all at the same time, and wait for them."""
    children = [_CONTEXT.Process(target=_without_garbage, args=(work, *one)) for one in arguments]
    for child in children:
        child.start()
    try:
        for child in children:
            child.join(limit)
        assert [child.exitcode for child in children] == [0] * len(children)
    finally:
        for child in children:
            child.kill()
            child.join()


def _without_garbage(work: Callable[..., None], *arguments: Any) -> None:
    gc.freeze()  # or each collection looks at all that is imported
    work(*arguments)
