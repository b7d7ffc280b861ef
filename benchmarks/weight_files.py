"""The files of a model's weights: which they are, how much of them is in the page cache, and a plain read of them.

    python weight_files.py REQUEST.json RESULT.json

A plain read is what the disk or the page cache can give: threads that read the files from front to back into one
buffer, which is used again and again.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness.report import environment

THREADS = 8
CHUNK = 8 * 2**20
"""Bytes of one call."""


def weight_files(root: Path) -> list[Path]:
    """The safetensors files of a model root, those of the partition that the benchmark loads."""
    partition = root / "FL2VA"
    return sorted((partition if partition.is_dir() else root).rglob("*.safetensors"))


def total_bytes(files: Sequence[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def plain_read(files: Sequence[Path], threads: int = THREADS) -> float:
    """Seconds that it takes to read all bytes of ``files`` once.

    Raises:
        OSError: a file cannot be read, or ends before its size says.
    """
    buffer = memoryview(np.ones(threads * CHUNK, dtype=np.uint8).data)  # touched: no page is missing while it is timed
    opened = [os.open(file, os.O_RDONLY) for file in files]
    pieces = _pieces(opened)
    lock = threading.Lock()
    failures: list[OSError] = []

    def work(index: int) -> None:
        into = buffer[index * CHUNK : (index + 1) * CHUNK]
        try:
            while True:
                with lock:
                    piece = next(pieces, None)
                if piece is None or failures:
                    return
                _fill(*piece, into)
        except OSError as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(index,)) for index in range(threads)]
    start = time.perf_counter()
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        for descriptor in opened:
            os.close(descriptor)
    if failures:
        raise failures[0]
    return time.perf_counter() - start


def drop_pages(files: Sequence[Path]) -> None:
    """Put ``files`` on the disk and out of the page cache, as far as the system does as it is told."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # a page that is not on the disk yet is not dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def cached(files: Sequence[Path]) -> float | None:
    """The part of ``files`` that is in the page cache, between 0 and 1; None where the system does not tell."""
    libc = ctypes.CDLL(None, use_errno=True)
    page, pages, present = os.sysconf("SC_PAGE_SIZE"), 0, 0
    for file in files:
        view = np.memmap(file, dtype=np.uint8, mode="r")
        resident = np.zeros(-(-view.nbytes // page), dtype=np.uint8)
        address, into = ctypes.c_void_p(view.ctypes.data), ctypes.c_void_p(resident.ctypes.data)
        if libc.mincore(address, ctypes.c_size_t(view.nbytes), into):
            return None
        pages, present = pages + len(resident), present + int((resident & 1).sum())
    return present / pages if pages else None


def _pieces(opened: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Descriptor, position and size of each piece, in the order of files and bytes."""
    for descriptor in opened:
        size = os.fstat(descriptor).st_size
        for position in range(0, size, CHUNK):
            yield descriptor, position, min(CHUNK, size - position)


def _fill(descriptor: int, position: int, size: int, into: memoryview) -> None:
    done = 0
    while done < size:
        got = os.preadv(descriptor, [into[done:size]], position + done)
        if not got:
            raise OSError(f"a file ends {size - done} bytes before its size says")
        done += got


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Times of plain reads: ``files``, ``repeats`` and whether each begins ``cold``; otherwise one read comes first."""
    files = [Path(name) for name in request["files"]]
    if not request["cold"]:
        plain_read(files)
    seconds, parts = [], []
    for _ in range(request["repeats"]):
        if request["cold"]:
            drop_pages(files)
        parts.append(cached(files))
        seconds.append(plain_read(files))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {"seconds": seconds, "cached": parts, "environment": asdict(environment(device))}


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(measure(json.loads(Path(sys.argv[1]).read_text()))))
