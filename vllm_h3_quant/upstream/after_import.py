"""Runs a function right after a module is imported, without importing it.

Why: a diffusion engine may run inside process 0, where the general plugins run before anything tells a
diffusion model from another, and importing the engine's layers there would cost every start seconds.
What it relies on is Python's own import protocol (``sys.meta_path``, ``Loader.exec_module``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def after_import(module: str, action: Callable[[], None]) -> None:
    """Call ``action`` now if ``module`` is imported, or else right after its first import.

    A second call for the same module replaces the action that waits.
    """
    if module in sys.modules:
        action()
        return
    sys.meta_path[:] = [finder for finder in sys.meta_path if not _waits_for(finder, module)]
    sys.meta_path.insert(0, _Watcher(module, action))


def _waits_for(finder: object, module: str) -> bool:
    return isinstance(finder, _Watcher) and finder.module == module


class _Watcher(MetaPathFinder):
    """Finds one module through the finders behind it and calls ``action`` once it has run."""

    def __init__(self, module: str, action: Callable[[], None]) -> None:
        self.module = module
        self.action = action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.module:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                self._watch(spec.loader)
                return spec
        return None

    def _watch(self, loader: object) -> None:
        run = loader.exec_module  # type: ignore[attr-defined]

        def exec_module(module: ModuleType) -> None:
            run(module)
            sys.meta_path.remove(self)
            self.action()

        loader.exec_module = exec_module  # type: ignore[attr-defined]
