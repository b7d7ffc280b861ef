"""Host memory of an exact size."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def test_pages_that_cuda_refuses_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime(error=2))
    with pytest.raises(H3QuantError, match=r"cannot be pinned \(CUDA error 2\).*pin_cpu_memory=False"):
        pages.allocate(PAGE, pinned=True)


def test_more_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(H3QuantError, match=r"1048576\.00 GiB of host memory .* cannot be had"):
        pages.allocate(2**50, pinned=False)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_another_process_maps_the_same_bytes() -> None:
    files = open_files()
    tensor = pages.allocate(2 * PAGE, pinned=False, shareable=True)
    tensor.fill_(7)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            torch.set_num_threads(1)  # the parent's other threads do not live here
            # Nothing is inherited but the numbers: the child opens the pages by its parent's name for them.
            theirs = pages.attach(os.getppid(), pages.file_of(tensor), 2 * PAGE, pinned=False)
            code = 0 if bool((theirs == 7).all()) and pages.held().foreign == 2 * PAGE else 2
            theirs[0] = 9
        finally:
            os._exit(code)  # nothing of the parent's goes on here
    assert os.waitpid(child, 0)[1] == 0
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
