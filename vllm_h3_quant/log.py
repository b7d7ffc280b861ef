"""Loggers that print through vLLM's handlers, with its process prefix and levels."""

from __future__ import annotations

import logging
from typing import Any

from vllm.logger import init_logger


def get_logger(name: str) -> Any:
    """A vLLM logger (it has ``info_once``) for a module of this package."""
    root = logging.getLogger("vllm_h3_quant")
    root.parent = logging.getLogger("vllm")
    root.propagate = True
    return init_logger(name)
