"""Host memory of an exact size, pinned where it lies.

PyTorch's pinned allocator rounds to powers of two: 50 blocks of 0.6 GiB would take 50 GiB. Here pages come from the
system and are registered with CUDA in place, which is also faster. Seconds a GiB on an H200's host (kernel 6.18), where
``pin_memory=True`` takes 0.7 s: registering pages that have been written 0.04, fresh ones 0.31, fresh ones of 2 MiB
0.17, and fresh ones of a memory file 0.49.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from vllm_h3_quant.errors import H3QuantError

NAME = "h3-quant-weights"
"""Name of the memory files, as ``/proc/PID/maps`` shows it."""


@dataclass(frozen=True)
class Held:
    """Bytes of host memory that this process holds through :func:`allocate` and :func:`attach`.

    Attributes:
        own: allocated by this process, whether or not others map them too.
        foreign: allocated by another process of this host and mapped here.
        pinned: registered with CUDA, of both.
    """

    own: int
    foreign: int
    pinned: int


class _Pages(mmap.mmap):
    """A mapping that is unregistered before it is unmapped. A tensor over it keeps it alive."""

    fd: int = -1
    address: int = 0
    runtime: Any = None  # of CUDA, while the pages are registered with it
    foreign: bool = False

    @property
    def pinned(self) -> bool:
        return self.runtime is not None

    def __del__(self) -> None:
        if sys.is_finalizing():
            return  # the system takes back a process's memory whole
        if self.pinned:
            # A copy from these pages may still be under way.
            torch.cuda.synchronize()
            if int(self.runtime.cudaHostUnregister(self.address)):
                forget_last_error()
        if self.fd >= 0:
            os.close(self.fd)


_live: weakref.WeakSet[_Pages] = weakref.WeakSet()
_of_tensor: weakref.WeakKeyDictionary[torch.UntypedStorage, _Pages] = weakref.WeakKeyDictionary()


def allocate(nbytes: int, *, pinned: bool, shareable: bool = False) -> torch.Tensor:
    """``(nbytes,)`` uint8 on the host, at the start of a page; given back when the last tensor over it is gone.

    Args:
        nbytes: how many, at least one.
        pinned: registered with CUDA, so that copies to a GPU run beside its kernels.
        shareable: as a memory file that :func:`attach` of another process can map.

    Raises:
        H3QuantError: the system or CUDA refuses.
    """
    fd = -1
    try:
        if shareable:
            fd = os.memfd_create(NAME)
            os.ftruncate(fd, nbytes)
        pages = _Pages(fd, nbytes) if shareable else _private(nbytes)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        raise H3QuantError(
            f"{nbytes / 2**30:.2f} GiB of host memory cannot be had ({error.strerror}): free host memory, or offload"
            " fewer components"
        ) from None
    pages.fd = fd
    return _tensor(pages, nbytes, pinned)


def attach(pid: int, fd: int, nbytes: int, *, pinned: bool) -> torch.Tensor:
    """The pages of another process of this host, as :func:`allocate` made them shareable there.

    Raises:
        OSError: they cannot be reached, or are no longer what was named.
        H3QuantError: CUDA refuses to register them.
    """
    path = f"/proc/{pid}/fd/{fd}"
    if NAME not in os.readlink(path):
        raise OSError(f"{path} is no memory of offloaded weights")
    opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(opened).st_size != nbytes:
            raise OSError(f"{path} has not {nbytes} bytes")
        pages = _Pages(opened, nbytes)
    finally:
        os.close(opened)
    pages.foreign = True
    return _tensor(pages, nbytes, pinned)


def can_pin() -> bool:
    """Whether there is a GPU to copy to. Without one the engine asks for pinned memory all the same."""
    return torch.cuda.is_available()


def pin(tensor: torch.Tensor) -> None:
    """Register what :func:`allocate` or :func:`attach` returned with CUDA, where it is not yet.

    Raises:
        H3QuantError: CUDA refuses.
    """
    pages = _of_tensor[tensor.untyped_storage()]
    if pages.pinned:
        return
    runtime = torch.cuda.cudart()
    error = int(runtime.cudaHostRegister(tensor.data_ptr(), tensor.numel(), 0))
    if error:
        forget_last_error()
        raise H3QuantError(
            f"{tensor.numel() / 2**30:.2f} GiB of host memory cannot be pinned (CUDA error {error}): free host memory,"
            " or pin no offloaded weights (pin_cpu_memory=False)"
        )
    pages.address = tensor.data_ptr()
    pages.runtime = runtime


def forget_last_error() -> None:
    """Have CUDA's runtime forget the error of a call, which PyTorch would else take for that of its next kernel."""
    major = (torch.version.cuda or "").partition(".")[0]
    ctypes.CDLL(f"libcudart.so.{major}").cudaGetLastError()


def part(tensor: torch.Tensor, first: int, nbytes: int) -> torch.Tensor:
    """``(nbytes,)`` uint8 of the pages under a tensor from :func:`allocate` or :func:`attach`, a storage by itself."""
    return torch.frombuffer(_of_tensor[tensor.untyped_storage()], dtype=torch.uint8, count=nbytes, offset=first)


def file_of(tensor: torch.Tensor) -> int:
    """The descriptor of the memory file that ``tensor`` from :func:`allocate` lies in."""
    return _of_tensor[tensor.untyped_storage()].fd


def held() -> Held:
    """What this process holds now, page by page."""
    pages = list(_live)
    return Held(
        own=sum(_whole_pages(p) for p in pages if not p.foreign),
        foreign=sum(_whole_pages(p) for p in pages if p.foreign),
        pinned=sum(_whole_pages(p) for p in pages if p.pinned),
    )


def _private(nbytes: int) -> _Pages:
    """Memory of this process alone."""
    pages = _Pages(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A fork would copy every page that is pinned.
    pages.madvise(mmap.MADV_DONTFORK)
    with suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def _whole_pages(pages: _Pages) -> int:
    return -(-len(pages) // mmap.PAGESIZE) * mmap.PAGESIZE


def _tensor(pages: _Pages, nbytes: int, pinned: bool) -> torch.Tensor:
    tensor = torch.frombuffer(pages, dtype=torch.uint8, count=nbytes)
    _live.add(pages)
    _of_tensor[tensor.untyped_storage()] = pages
    if pinned:
        pin(tensor)
    return tensor
