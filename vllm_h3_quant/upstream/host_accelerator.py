"""Gives ``torch.accelerator`` an answer on a machine without one.

Why: the engine's loader and offload code call ``torch.accelerator`` directly, and every function of
it raises when no accelerator is present. Symbols: the functions below, torch 2.11 to 2.13, and their
callers in ``vllm_omni.diffusion`` 0.30.0. When a start on the CPU fails with "Please install the
accelerator", look for the function that is missing here.
"""

from __future__ import annotations

from typing import Any

import psutil
import torch


def serve_from_host(stream: Any) -> None:
    """Answer memory queries with this process's and the host's memory, and streams with ``stream``."""
    accelerator = torch.accelerator
    accelerator.empty_cache = lambda: None
    accelerator.synchronize = lambda device=None: None
    accelerator.current_stream = lambda device=None: stream
    accelerator.reset_peak_memory_stats = lambda device=None: None
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(accelerator, name, lambda device=None: psutil.Process().memory_info().rss)
    accelerator.get_memory_info = lambda device=None: (
        psutil.virtual_memory().available,
        psutil.virtual_memory().total,
    )
