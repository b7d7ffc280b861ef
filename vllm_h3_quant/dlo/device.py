"""Copies to a device on a stream of their own, behind and before the products that use them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Device:
    """A device by the engine's platform.

    Args:
        device: the device.
        platform: ``vllm_omni.platforms.current_omni_platform``, or what has its ``Stream``, ``Event``, ``stream`` and
            ``current_stream``.
    """

    def __init__(self, device: torch.device, platform: Any) -> None:
        self.torch = device
        self._platform = platform
        self._stream: Any = None

    @contextmanager
    def copies(self) -> Iterator[Copies]:
        """Copies that begin after what the device has been told so far; all are over for what it is told afterwards."""
        if self._stream is None:
            self._stream = self._platform.Stream()
        try:
            yield Copies(self._platform, self._stream)
        finally:
            # Also after an error: memory of a copy that is under way must not be given to another tensor.
            self._platform.current_stream().wait_stream(self._stream)


class Copies:
    """One copy after the other, each after what the device was told before it was started."""

    def __init__(self, platform: Any, stream: Any) -> None:
        self._platform = platform
        self._stream = stream

    def start(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy beside what the device is told from now on."""
        self._stream.wait_stream(self._platform.current_stream())
        with self._platform.stream(self._stream):
            target.copy_(source, non_blocking=True)
        self._over = self._platform.Event()
        self._over.record(self._stream)

    def arrive(self) -> None:
        """What the device is told from now on comes after the last copy."""
        self._platform.current_stream().wait_event(self._over)
