"""What every table of backends shares."""

from __future__ import annotations

Capability = tuple[int, int]


class NoBackend(LookupError):
    """No backend serves the request on the device. The message lists each with its reason."""


def nothing_missing() -> None:
    """For a backend that every process has."""


def out_of_range(capabilities: tuple[Capability, Capability] | None, capability: Capability | None) -> str | None:
    """Why a range of compute capabilities does not hold ``capability`` (None is the CPU); None when it does.

    Args:
        capabilities: the first served and the first one past the range; None for a backend of the CPU.
        capability: of the device.
    """
    if capabilities is None:
        return None if capability is None else "runs on the CPU only"
    if capability is None:
        return "needs a CUDA device"
    first, end = capabilities
    if capability < first:
        return f"needs sm_{_sm(first)} or above"
    if capability >= end:
        return f"is not built for sm_{_sm(end)} and above"
    return None


def told(name: str, capability: Capability | None) -> str:
    """A device for messages: its name, and its compute capability where it has one."""
    return name if capability is None else f"{name} (sm_{_sm(capability)})"


def _sm(capability: Capability) -> int:
    return capability[0] * 10 + capability[1]
