"""Streams and events of a device that does one thing at a time."""

from __future__ import annotations

import time
from typing import Any


class HostEvent:
    """A point in time on the host."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._at: float | None = None

    def record(self, stream: HostStream | None = None) -> None:
        self._at = time.perf_counter()

    def wait(self, stream: HostStream | None = None) -> None:
        """Everything before an event has happened when it is recorded."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """See :meth:`wait`."""

    def elapsed_time(self, end: HostEvent) -> float:
        """Milliseconds from this event to ``end``.

        Raises:
            RuntimeError: one of the two was never recorded.
        """
        if self._at is None or end._at is None:
            raise RuntimeError("elapsed_time needs two recorded events")
        return (end._at - self._at) * 1e3


class HostStream:
    """The host's one queue: what is put there is done when the call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: HostStream) -> None:
        """Nothing is ever pending."""

    def wait_event(self, event: HostEvent) -> None:
        """Nothing is ever pending."""

    def record_event(self, event: HostEvent | None = None) -> HostEvent:
        event = event or HostEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Nothing is ever pending."""

    def query(self) -> bool:
        return True

    def __enter__(self) -> HostStream:
        return self

    def __exit__(self, *exc: object) -> None:
        return None


HOST_STREAM = HostStream()
