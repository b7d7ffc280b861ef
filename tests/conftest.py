"""Environment and fixtures shared by all tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Before torch reads it. The tiny model's products only lose by threads, and processes run beside each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
if not torch.cuda.is_available():
    # Read when a kernel is decorated, so before any module of kernels/ is imported.
    os.environ["TRITON_INTERPRET"] = "1"
# Processes that tests start import the benchmarks' harness too.
_BENCHMARKS = str(Path(__file__).parents[1] / "benchmarks")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_BENCHMARKS, os.environ.get("PYTHONPATH")]))

_TOGETHER = {
    "clips": ("e2e/test_two_ranks", "e2e/test_attention_clips", "e2e/test_fused_clips", "e2e/test_python_api"),
    "ranks": ("dlo/test_ranks", "blocks/test_ulysses", "methods/test_sharding", "dlo/test_sharing", "dlo/test_pages"),
}
"""Files that compare the same clips, and those whose processes come from one that has imported the engine."""

_LONGEST = (
    "clips",
    "e2e/test_examples",
    "e2e/test_demo",
    "e2e/test_lora_clips",
    "ranks",
    "e2e/test_bad_input",
    "e2e/test_checkpoint_clips",
    "dlo/test_modes",
    "benchmarks/test_bench_offload",
    "benchmarks/test_bench_load",
    "benchmarks/test_benchmarks",
    "kernels/test_compile",
)
"""Groups that come first, so that none of them is what the other workers wait for at the end."""


def _group(nodeid: str) -> str:
    """What a test shares a worker with: its file, or a key of :data:`_TOGETHER`."""
    file = nodeid.split("::", 1)[0].removeprefix("tests/").removesuffix(".py")
    return next((group for group, files in _TOGETHER.items() if file in files), file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Groups stay together and are handed out in the order of the collection."""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid)

    config.option.loadscopereorder = False  # the engine's tests are few in a file, and long
    return ByGroup(config, log)


def pytest_collection_finish() -> None:
    set_aside()


def set_aside() -> None:
    """Take what is imported out of the garbage collector's sight, which needs 0.7 s to look at it otherwise."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        place = {group: index for index, group in enumerate(_LONGEST)}
        items.sort(key=lambda item: place.get(_group(item.nodeid), len(place)))
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
    import vllm_omni.diffusion.models.minimax_h3.pipeline_minimax_h3  # noqa: F401
    from harness.engine import process_groups

    with process_groups() as config:
        set_aside()
        yield config


@pytest.fixture
def load_pipeline(one_rank: Any, tiny_h3: Path) -> Callable[..., Any]:
    """``load(quantization_config, model=tiny_h3, **more)``: the pipeline, by the engine's own loader."""
    from harness import engine

    def load(quantization_config: Any, *, model: Path = tiny_h3, **more: Any) -> Any:
        return engine.load_pipeline(model, quantization_config, **more)

    return load
