"""Something runs right after another module's first import, and that import stays as it is."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from vllm_h3_quant.upstream.after_import import after_import


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = "imported_later"
    (tmp_path / f"{name}.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


def test_after_the_first_import(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    seen: list[int] = []
    finders = len(sys.meta_path)
    after_import(module, lambda: seen.append(0))
    after_import(module, lambda: seen.append(sys.modules[module].value))
    assert module not in sys.modules
    assert len(sys.meta_path) == finders + 1
    importlib.import_module(module)
    assert seen == [1], "the last action, once, when the module is complete"
    assert len(sys.meta_path) == finders
    importlib.reload(sys.modules[module])
    assert seen == [1]


def test_a_module_that_is_there(module: str) -> None:
    importlib.import_module(module)
    seen: list[int] = []
    after_import(module, lambda: seen.append(1))
    assert seen == [1]


def test_a_module_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    after_import("imported_never", lambda: None)
    with pytest.raises(ModuleNotFoundError, match="imported_never"):
        importlib.import_module("imported_never")
