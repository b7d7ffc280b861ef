"""What tests of several benchmarks need."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[ModuleType], Path]:
    """Has a benchmark look in a folder of its test for the scripts that it starts; the folder."""

    def folder_for(benchmark: ModuleType) -> Path:
        folder = tmp_path / "scripts"
        folder.mkdir()
        monkeypatch.setattr(benchmark, "HERE", folder)
        return folder

    return folder_for
