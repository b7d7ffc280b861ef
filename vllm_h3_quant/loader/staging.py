"""Rows of a file on their way to a GPU: read by several threads into pinned buffers, copied while the next are read.

A copy out of a mapped file goes through the driver's own pageable path, 5.5 GB/s on an H200's host where pinned
memory gives 55. Tensors are mostly asked for in the order of their file, so reading goes on behind the last row that
was asked for: the file is busy while a weight is quantized, and the next weight finds its first rows read.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path

import torch

from vllm_h3_quant.dlo import pages
from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.loader.header import Entry

CHUNK = 64 * 2**20
BUFFERS = 4
"""Two or three are read into, one is copied from, and the copy out of the last has long been enqueued."""
THREADS = min(16, os.cpu_count() or 1)


@dataclass
class _Buffer:
    memory: torch.Tensor
    copied: torch.cuda.Event | None


class _File:
    """An open file, and what tells whether it was written since."""

    def __init__(self, path: Path) -> None:
        try:
            self.descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise H3QuantError(f"{path}: cannot be read ({error.strerror})") from None
        status = os.fstat(self.descriptor)
        self.nbytes = status.st_size
        self.state = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns

    def close(self) -> None:
        os.close(self.descriptor)


@dataclass(frozen=True)
class _Piece:
    """Bytes of a file on their way into a buffer; each of ``reads`` tells how many it got."""

    begin: int
    nbytes: int
    buffer: _Buffer
    reads: list[Future[int]]

    @property
    def end(self) -> int:
        return self.begin + self.nbytes

    def wait(self, entry: Entry) -> None:
        """Wait until all of it is there.

        Raises:
            H3QuantError: the file has less, or cannot be read; the message names ``entry``.
        """
        try:
            got = sum(read.result() for read in self.reads)
        except OSError as error:
            raise H3QuantError(f"{entry.file}: tensor {entry.name!r} cannot be read ({error.strerror})") from None
        if got != self.nbytes:
            raise H3QuantError(f"{entry.file}: truncated in tensor {entry.name!r}; copy the file again")

    def drop(self) -> None:
        """Wait until nothing writes into the buffer; what was read, or why it was not, matters to nobody."""
        for read in self.reads:
            read.exception()


@dataclass(frozen=True)
class _Ahead:
    """What lies behind the last row that was asked for."""

    piece: _Piece
    file: _File

    def has(self, entry: Entry, begin: int) -> bool:
        """Whether a row of ``entry`` that begins there is in it."""
        skipped = begin - self.piece.begin
        return 0 <= skipped <= self.piece.nbytes - entry.row_nbytes and skipped % entry.torch_dtype.itemsize == 0

    def drop(self) -> None:
        self.piece.drop()
        self.file.close()


class Stage:
    """Buffers, pinned where there is a GPU, and the threads that read into them."""

    def __init__(self) -> None:
        self._buffers = [_buffer() for _ in range(BUFFERS)]
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="h3-quant-read")
        self._next = 0
        self._ahead: _Ahead | None = None

    def rows(self, entry: Entry, first: int, count: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Pieces of the rows from ``first`` on, each with its own first row.

        Copies out of a piece must be enqueued on the current stream before the next piece is asked for.

        Raises:
            H3QuantError: the file ends before the rows do.
        """
        width = entry.row_nbytes
        if width > CHUNK:
            raise H3QuantError(f"{entry.file}: a row of tensor {entry.name!r} has {width} bytes, more than {CHUNK}")
        begin = entry.start + first * width
        end = begin + count * width
        if begin == end:
            return
        file, known = self._open(entry, begin)
        started: deque[_Piece] = deque([known] if known else [])
        at = begin if known is None else min(begin + (known.end - begin) // width * width, end)
        waiting = iter(_ranges(at, end, width, file.nbytes if known is None or known.end <= end else end))
        ahead = None
        try:
            started.extend(self._start(file, *piece) for piece in islice(waiting, BUFFERS - 2))
            while started:
                piece = started.popleft()
                if piece.begin >= end:
                    ahead = piece
                    break
                piece.wait(entry)
                low = max(piece.begin, begin)
                high = min(low + (piece.end - low) // width * width, end)
                raw = piece.buffer.memory[low - piece.begin : high - piece.begin]
                yield (low - entry.start) // width, raw.view(entry.torch_dtype).reshape(-1, *entry.shape[1:])
                if piece.buffer.copied is not None:
                    piece.buffer.copied.record()
                if piece.end > end:
                    ahead = piece
                started.extend(self._start(file, *piece) for piece in islice(waiting, 1))
        finally:
            for piece in started:
                piece.drop()
            if ahead is None:
                file.close()
            else:
                self._ahead = _Ahead(ahead, file)

    def close(self) -> None:
        """Give the threads back."""
        self._drop_ahead()
        self._pool.shutdown()

    def _open(self, entry: Entry, begin: int) -> tuple[_File, _Piece | None]:
        """The file, with what has been read of the row that begins there."""
        file = _File(entry.file)
        if self._ahead is not None and self._ahead.file.state == file.state and self._ahead.has(entry, begin):
            file.close()
            ahead, self._ahead = self._ahead, None
            return ahead.file, ahead.piece
        self._drop_ahead()
        return file, None

    def _drop_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.drop()
            self._ahead = None

    def _start(self, file: _File, begin: int, end: int) -> _Piece:
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % BUFFERS
        if buffer.copied is not None:
            buffer.copied.synchronize()
        nbytes = end - begin
        view = memoryview(buffer.memory.numpy().data)
        step = -(-nbytes // THREADS)
        reads = [
            self._pool.submit(_read, file.descriptor, view[at : min(at + step, nbytes)], begin + at)
            for at in range(0, nbytes, step or 1)
        ]
        return _Piece(begin, nbytes, buffer, reads)


def _ranges(begin: int, end: int, width: int, file_end: int) -> Iterator[tuple[int, int]]:
    """Bytes of whole rows that fill a buffer each, and a buffer's fill of what the file has behind them."""
    step = CHUNK // width * width
    for at in range(begin, end, step):
        yield at, min(at + step, end)
    if end < file_end:
        yield end, min(end + CHUNK, file_end)


def _buffer() -> _Buffer:
    if not pages.can_pin():
        return _Buffer(pages.allocate(CHUNK, pinned=False), None)
    try:
        memory = pages.allocate(CHUNK, pinned=True)
    except H3QuantError:
        # A system on which CUDA registers no memory may still have its own. PyTorch keeps that when the load is over.
        memory = torch.empty(CHUNK, dtype=torch.uint8, device="cpu", pin_memory=True)
    return _Buffer(memory, torch.cuda.Event())


def _read(descriptor: int, into: memoryview, position: int) -> int:
    done = 0
    while done < len(into):
        got = os.preadv(descriptor, [into[done:]], position + done)
        if not got:
            break
        done += got
    return done


@cache
def stage() -> Stage:
    """The process's buffers, made at first use."""
    return Stage()


def release() -> None:
    """Give the buffers and threads back."""
    if stage.cache_info().currsize:
        stage().close()
        stage.cache_clear()
