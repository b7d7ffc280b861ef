"""Stands for CUDA's runtime where host memory is registered with it."""

from __future__ import annotations

from pathlib import Path


class Runtime:
    """CUDA's runtime as far as pages are registered with it."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if not self.error:
            self.registered[address] = size
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        assert mapped(address), "unmapped before it was unregistered"
        del self.registered[address]
        return 0


def mapped(address: int) -> bool:
    spans = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(first, 16) <= address < int(last, 16) for first, last in spans)
