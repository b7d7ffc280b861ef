"""The mutable state through which vLLM-Omni tells a MiniMax-H3 VAE about its parallel group."""

from typing import Any

_STATE: dict[str, Any] = {}


def get_parallel_state() -> dict[str, Any]:
    """The one state of this process; the caller changes it in place."""
    return _STATE
