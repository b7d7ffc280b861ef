"""What is going on now: spinners with elapsed time on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


class Steps:
    """Steps with a name, one after another or side by side; each leaves a line with the time that it took."""

    def __init__(self, console: Console) -> None:
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        self._console = console
        self._live = Progress(*columns, console=console, transient=True) if console.is_terminal else None
        self._running: dict[str, tuple[float, TaskID | None]] = {}

    def __enter__(self) -> Steps:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def begin(self, name: str) -> None:
        """Show that ``name`` runs."""
        task = self._live.add_task(name, total=None) if self._live else None
        if task is None:
            self._print(f"{name} ...")
        self._running[name] = time.monotonic(), task

    def end(self, name: str) -> None:
        """Say how long ``name`` took."""
        started, task = self._running.pop(name)
        if self._live and task is not None:
            self._live.remove_task(task)
        self._print(f"{name}: {time.monotonic() - started:.1f} s")

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """:meth:`begin` before the block and :meth:`end` after it, if it succeeds."""
        self.begin(name)
        yield
        self.end(name)

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False)
