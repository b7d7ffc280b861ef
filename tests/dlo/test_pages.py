"""Host memory of an exact size."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import children
import pytest
import torch
from cuda_runtime import Runtime

from vllm_h3_quant.dlo import pages
from vllm_h3_quant.errors import H3QuantError

PAGE = os.sysconf("SC_PAGESIZE")


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    found = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return found


@pytest.fixture(autouse=True)
def nothing_held() -> Any:
    gc.collect()
    before = pages.held()
    yield
    gc.collect()
    assert pages.held() == before


@pytest.mark.parametrize("shareable", [False, True])
@pytest.mark.parametrize("nbytes", [1, PAGE, 3 * PAGE + 1])
def test_bytes_are_held_to_the_page_while_a_tensor_lives(nbytes: int, shareable: bool) -> None:
    before = pages.held().own
    tensor = pages.allocate(nbytes, pinned=False, shareable=shareable)
    assert tensor.shape == (nbytes,)
    assert tensor.data_ptr() % PAGE == 0
    assert not tensor.any()
    assert pages.held().own - before == -(-nbytes // PAGE) * PAGE
    view = tensor[:1]
    del tensor
    gc.collect()
    view.fill_(3)
    assert pages.held().own > before


def test_pinned_pages_are_unregistered_before_they_are_unmapped(runtime: Runtime) -> None:
    tensor = pages.allocate(PAGE + 1, pinned=True)
    assert runtime.registered == {tensor.data_ptr(): PAGE + 1}
    pages.pin(tensor)
    assert pages.held().pinned == 2 * PAGE
    del tensor
    gc.collect()
    assert runtime.registered == {}


def test_pages_are_unregistered_where_they_were_registered(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """An address that CUDA believes to be registered could not be registered again."""
    tensor = pages.allocate(PAGE, pinned=True)
    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    del tensor
    gc.collect()
    assert runtime.registered == {}


def test_pages_that_cuda_refuses_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime(error=2))
    with pytest.raises(H3QuantError, match=r"cannot be pinned \(CUDA error 2\).*pin_cpu_memory=False"):
        pages.allocate(PAGE, pinned=True)


def test_more_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(H3QuantError, match=r"1048576\.00 GiB of host memory cannot be had"):
        pages.allocate(2**50, pinned=False)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def read_and_write(owner: int, file: int) -> None:
    theirs = pages.attach(owner, file, 2 * PAGE, pinned=False)
    assert (theirs == 7).all()
    assert pages.held().foreign == 2 * PAGE
    theirs[0] = 9


def test_another_process_maps_the_same_bytes() -> None:
    children.run(int, [()])  # opens what stays open for later ones
    files = open_files()
    tensor = pages.allocate(2 * PAGE, pinned=False, shareable=True)
    tensor.fill_(7)
    children.run(read_and_write, [(os.getpid(), pages.file_of(tensor))])
    assert tensor[0] == 9
    del tensor
    gc.collect()
    assert open_files() == files


@pytest.mark.parametrize(
    "wrong",
    [
        lambda pid, fd, nbytes: (pid, 10_000, nbytes),
        lambda pid, fd, nbytes: (pid, fd, nbytes - 1),
        lambda pid, fd, nbytes: (pid, 0, nbytes),
        lambda pid, fd, nbytes: (2**22 + 1, fd, nbytes),
    ],
    ids=["closed", "size", "another file", "no process"],
)
def test_pages_that_are_not_what_was_named(wrong: Callable[[int, int, int], tuple[int, int, int]]) -> None:
    tensor = pages.allocate(PAGE, pinned=False, shareable=True)
    files = open_files()
    with pytest.raises(OSError):
        pages.attach(*wrong(os.getpid(), pages.file_of(tensor), PAGE), pinned=False)
    assert open_files() == files


@pytest.mark.gpu
def test_an_error_that_was_told_is_not_found_by_the_next_kernel() -> None:
    tensor = pages.allocate(PAGE, pinned=True)
    registered = pages._of_tensor[tensor.untyped_storage()]
    runtime, registered.runtime = registered.runtime, None
    with pytest.raises(H3QuantError, match="cannot be pinned"):
        pages.pin(tensor)  # registered already
    registered.runtime = runtime
    assert torch.ones(3, device="cuda").add(1).sum() == 6
