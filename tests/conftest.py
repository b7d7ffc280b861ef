"""Environment and fixtures shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
if not torch.cuda.is_available():
    # Read when a kernel is decorated, so before any module of kernels/ is imported.
    os.environ["TRITON_INTERPRET"] = "1"
# Processes that tests start import the benchmarks' harness too.
_BENCHMARKS = str(Path(__file__).parents[1] / "benchmarks")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_BENCHMARKS, os.environ.get("PYTHONPATH")]))

_SHARED = {f"tests/e2e/test_{name}.py" for name in ("attention_clips", "fused_clips", "python_api", "two_ranks")}
"""Files that compare the same clips."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files stay together, and so do those that share clips."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::", 1)[0]
            return "clips" if file in _SHARED else file

    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    without_gpu = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(without_gpu)


@pytest.fixture(scope="session")
def tiny_h3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny MiniMax-H3 checkpoint; ``VLLM_H3_QUANT_TINY`` names a folder to keep it in."""
    from vllm_h3_quant.tiny_h3 import write_tiny_h3

    kept = os.environ.get("VLLM_H3_QUANT_TINY")
    return write_tiny_h3(Path(kept) if kept else tmp_path_factory.mktemp("tiny") / "h3")


@pytest.fixture(scope="session")
def one_rank() -> Iterator[Any]:
    """vLLM's and vLLM-Omni's process groups with one rank; the vLLM configuration."""
    from harness.engine import process_groups

    with process_groups() as config:
        yield config


@pytest.fixture
def load_pipeline(one_rank: Any, tiny_h3: Path) -> Callable[..., Any]:
    """``load(quantization_config, model=tiny_h3, **more)``: the pipeline, by the engine's own loader."""
    from harness import engine

    def load(quantization_config: Any, *, model: Path = tiny_h3, **more: Any) -> Any:
        return engine.load_pipeline(model, quantization_config, **more)

    return load
