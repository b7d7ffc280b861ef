"""A tiny model that is exported, and one that a test may change first."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from exported_files import SPEC

from vllm_h3_quant.export.config import parse_request
from vllm_h3_quant.export.run import Exported, export
from vllm_h3_quant.loader.reader import close_files
from vllm_h3_quant.tiny_h3 import write_tiny_h3

Export = Callable[..., Exported]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model. Not to be changed."""
    return write_tiny_h3(tmp_path_factory.mktemp("export") / "h3", SPEC)


@pytest.fixture
def own_model(model: Path, tmp_path: Path) -> Path:
    """A tiny model that a test may change."""
    return shutil.copytree(model, tmp_path / "own")


@pytest.fixture(autouse=True)
def no_open_files() -> Iterator[None]:
    """A test may write a file that another had open."""
    yield
    close_files()


@pytest.fixture(scope="session")
def run_export() -> Export:
    """``run_export(model, out, spec, **more)`` on the CPU."""

    def run(model: Path, out: Path, spec: Any, **more: Any) -> Exported:
        return export(model, out, parse_request(spec, where="test"), device=torch.device("cpu"), **more)

    return run
