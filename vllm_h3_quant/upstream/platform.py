"""The device that this rank computes on, as the engine's platform knows it.

Symbol: ``current_omni_platform`` in ``vllm_omni.platforms``, vLLM-Omni 0.30.0, which is public; its ``Stream`` and
``Event`` are those of the device's torch module.
"""

from __future__ import annotations

from typing import Any

import torch


def compute_platform() -> Any:
    """The platform: ``Stream``, ``Event``, ``stream``, ``current_stream``."""
    from vllm_omni.platforms import current_omni_platform

    return current_omni_platform


def compute_device() -> torch.device:
    """The device of this rank."""
    device: torch.device = compute_platform().get_torch_device()
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
