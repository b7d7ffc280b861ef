"""Asks before the engine touches a model, and lets an error of ours reach the user as one line.

Why: the engine looks for the model on the hub before it looks at anything else, and what fails while it starts is
printed by every thread and process that it passes through, 80 lines each time.
Symbols, vLLM-Omni 0.30.0: ``OmniBase.__init__(self, model, **kwargs)`` in ``entrypoints.omni_base``, which every Python
engine and API server runs first; ``OmniServeCommand.validate(self, args)`` in ``entrypoints.cli.serve`` and ``main()``
in ``entrypoints.cli.main``, the command line before and around it; ``OmniEngineBase._bootstrap_orchestrator`` and
``._wait_for_orchestrator_init`` in ``engine.omni_engine_base``, between which a failed start crosses threads as a
future; ``WorkerProc.worker_main`` in ``diffusion.worker.diffusion_worker``, whose parent reads ``["status"]`` of what
comes through ``pipe_writer``; ``MultiprocDiffusionExecutor._launch_workers`` in
``diffusion.executor.multiproc_executor``, that parent, which leaves the other workers behind: one that waits for a peer
in its own clean-up lets no process end. The loggers of the modules in ``_LOGGERS`` print the same exception on its way.
Where a symbol has moved nothing is wrapped: starts go as without this module. When they move: look for where the engine
first uses the model's name, and who prints what a stage raises.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.upstream.after_import import after_import
from vllm_h3_quant.upstream.preflight import Symbol, problem

_BASE = "vllm_omni.entrypoints.omni_base"
_SERVE = "vllm_omni.entrypoints.cli.serve"
_MAIN = "vllm_omni.entrypoints.cli.main"
_ENGINE = "vllm_omni.engine.omni_engine_base"
_WORKER = "vllm_omni.diffusion.worker.diffusion_worker"
_EXECUTOR = "vllm_omni.diffusion.executor.multiproc_executor"
SYMBOLS = (
    Symbol("vllm-omni", _BASE, "OmniBase.__init__", ("self", "model", "kwargs")),
    Symbol("vllm-omni", _SERVE, "OmniServeCommand.validate", ("self", "args")),
    Symbol("vllm-omni", _MAIN, "main"),
    Symbol("vllm-omni", _ENGINE, "OmniEngineBase._bootstrap_orchestrator", ("self", "startup_future")),
    Symbol("vllm-omni", _ENGINE, "OmniEngineBase._wait_for_orchestrator_init", ("self", "startup_future")),
    Symbol("vllm-omni", _WORKER, "WorkerProc.worker_main", ("rank", "od_config", "pipe_writer")),
    Symbol("vllm-omni", _EXECUTOR, "MultiprocDiffusionExecutor._launch_workers", ("self",)),
)
_LOGGERS = (_ENGINE, "vllm_omni.engine.stage_runtime")
_ORIGINAL = "_h3_quant_original"
GRACE_S = 5.0
"""For a worker to end after it was told, twice at most."""

Check = Callable[[Mapping[str, Any]], None]
Explain = Callable[[Mapping[str, Any]], str | None]
Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


def install(check: Check, explain: Explain) -> None:
    """Wrap what starts an engine in this process from now on. A second call replaces the first.

    Args:
        check: called with the arguments of a start, ``model`` among them, before the engine uses them; raises
            :class:`H3QuantError`.
        explain: called with them where the engine could not use the model; what it says is raised from the engine's
            error.
    """
    wrappers: dict[str, Wrapper] = {
        "OmniBase.__init__": lambda original: _checked_engine(original, check, explain),
        "OmniServeCommand.validate": lambda original: _checked_command(original, check, explain),
        "main": _one_line,
        "OmniEngineBase._bootstrap_orchestrator": _left_to_future,
        "OmniEngineBase._wait_for_orchestrator_init": _as_ours,
        "WorkerProc.worker_main": _told_to_parent,
        "MultiprocDiffusionExecutor._launch_workers": _with_no_worker_left,
    }
    for module in dict.fromkeys(symbol.module for symbol in SYMBOLS):
        after_import(module, functools.partial(_wrap, module, wrappers))
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(one, _WithoutTraceback) for one in logger.filters):
            logger.addFilter(_WithoutTraceback())


def ours(error: BaseException | None) -> H3QuantError | None:
    """The error of this package that an exception is, or was raised from."""
    while error is not None and not isinstance(error, H3QuantError):
        error = error.__cause__
    return error


def _wrap(module: str, wrappers: Mapping[str, Wrapper]) -> None:
    symbols = [symbol for symbol in SYMBOLS if symbol.module == module]
    if any(map(problem, symbols)):
        return
    for symbol in symbols:
        *path, name = symbol.name.split(".")
        owner: Any = sys.modules[module]
        for part in path:
            owner = getattr(owner, part)
        current = getattr(owner, name)
        original = getattr(current, _ORIGINAL, current)
        wrapped = functools.wraps(original)(wrappers[symbol.name](original))
        setattr(wrapped, _ORIGINAL, original)
        setattr(owner, name, staticmethod(wrapped) if isinstance(vars(owner)[name], staticmethod) else wrapped)


def _checked_engine(original: Callable[..., Any], check: Check, explain: Explain) -> Callable[..., Any]:
    def init(self: Any, model: str, **kwargs: Any) -> None:
        _checked(functools.partial(original, self, model, **kwargs), check, explain, {**kwargs, "model": model})

    return init


def _checked_command(original: Callable[..., Any], check: Check, explain: Explain) -> Callable[..., Any]:
    def validate(self: Any, args: Any) -> None:
        # The model may stand behind the command or behind --model, whose default is another model.
        given = {**vars(args), "model": getattr(args, "model_tag", None) or getattr(args, "model", None)}
        _checked(functools.partial(original, self, args), check, explain, given)

    return validate


def _checked(start: Callable[[], None], check: Check, explain: Explain, arguments: Mapping[str, Any]) -> None:
    check(arguments)
    try:
        start()
    except (ValueError, OSError) as error:
        line = explain(arguments)
        if line is None:
            raise
        raise H3QuantError(line) from error


def _one_line(original: Callable[..., Any]) -> Callable[..., Any]:
    """End a command with our line alone."""

    def main(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except H3QuantError as error:
            print(f"vllm: error: {' '.join(str(error).split())}", file=sys.stderr)
            raise SystemExit(1) from None

    return main


def _left_to_future(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let the orchestrator's thread end silently where the thread that waits for it raises the same."""

    def bootstrap(self: Any, stage_init_timeout: int, startup_future: Any) -> None:
        try:
            original(self, stage_init_timeout, startup_future)
        except Exception as error:
            raised = startup_future.done() and ours(startup_future.exception())
            if not raised or raised is not ours(error):
                raise

    return bootstrap


def _as_ours(original: Callable[..., Any]) -> Callable[..., Any]:
    """Raise our error itself, not the engine's around it with the frames of two threads."""

    def wait(self: Any, startup_future: Any, startup_timeout: int) -> None:
        try:
            original(self, startup_future, startup_timeout)
        except RuntimeError as error:
            found = ours(error)
            if found is None:
                raise
            raise H3QuantError(str(found)) from None

    return wait


class Refusal:
    """What a worker sends in the place of its status; whoever reads the status raises the worker's error."""

    def __init__(self, line: str) -> None:
        self.line = line

    def __getitem__(self, key: str) -> NoReturn:
        raise H3QuantError(self.line)


def _told_to_parent(original: Callable[..., Any]) -> Callable[..., Any]:
    """Send our error to the process that waits for a worker, and end the worker without printing it."""

    def worker_main(rank: int, od_config: Any, pipe_writer: Any, *args: Any, **kwargs: Any) -> None:
        try:
            original(rank, od_config, pipe_writer, *args, **kwargs)
        except Exception as error:
            found = ours(error)
            if found is None:
                raise
            try:
                pipe_writer.send(Refusal(str(found)))
            except OSError:
                raise error from None  # nobody waits any more
            raise SystemExit(1) from None

    return worker_main


def _with_no_worker_left(original: Callable[..., Any]) -> Callable[..., Any]:
    """End the workers of a launch that an error of ours ended."""

    def launch_workers(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = set(multiprocessing.active_children())
        try:
            return original(self, *args, **kwargs)
        except H3QuantError:
            end_processes(set(multiprocessing.active_children()) - before)
            raise

    return launch_workers


def end_processes(processes: Iterable[Any], grace_s: float = GRACE_S) -> None:
    """Wait for processes to end by themselves, ask those that do not, and kill those that do not then."""
    left = _outlasting(processes, grace_s)
    for ask in ("terminate", "kill"):
        for process in left:
            getattr(process, ask)()
        left = _outlasting(left, grace_s)


def _outlasting(processes: Iterable[Any], grace_s: float) -> list[Any]:
    """Processes that are still there after as many seconds."""
    waiting = list(processes)
    deadline = time.monotonic() + grace_s
    for process in waiting:
        process.join(max(0.0, deadline - time.monotonic()))
    return [process for process in waiting if process.is_alive()]


class _WithoutTraceback(logging.Filter):
    """Drops the traceback of an error of ours, which the user gets as one line at the end."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and ours(record.exc_info[1]):
            record.exc_info = record.exc_text = None
        return True
