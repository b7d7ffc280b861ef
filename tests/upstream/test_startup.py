"""Errors of this package on their way out of an engine that starts: one line, once, and no other error changed."""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import pickle
import signal
import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import pytest

from vllm_h3_quant import plugin
from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.upstream import startup
from vllm_h3_quant.upstream.preflight import problem
from vllm_h3_quant.upstream.startup import Refusal, ours

plugin.register()


@pytest.mark.parametrize("symbol", startup.SYMBOLS, ids=lambda symbol: symbol.path)
def test_installed_versions_have_every_symbol(symbol: Any) -> None:
    assert problem(symbol) is None


def wrapped(name: str) -> Any:
    """The engine's function with this package's around it."""
    import importlib

    symbol = next(symbol for symbol in startup.SYMBOLS if symbol.name == name)
    found = importlib.import_module(symbol.module)
    for part in name.split("."):
        found = getattr(found, part)
    assert hasattr(found, "_h3_quant_original"), "not wrapped"
    return found


def around(name: str, original: Any) -> Any:
    """This package's wrapper around another function than the engine's."""
    wrapper = {
        "main": startup._one_line,
        "bootstrap": startup._left_to_future,
        "wait": startup._as_ours,
        "worker": startup._told_to_parent,
    }[name]
    return wrapper(original)


def test_every_symbol_is_wrapped_once() -> None:
    plugin.register()
    for symbol in startup.SYMBOLS:
        found = wrapped(symbol.name)
        assert not hasattr(found._h3_quant_original, "_h3_quant_original")


def test_a_worker_is_found_by_name_in_another_process() -> None:
    worker_main = wrapped("WorkerProc.worker_main")
    assert pickle.loads(pickle.dumps(worker_main)) is worker_main


class TestCommand:
    def test_the_model_is_looked_at_before_the_engine_asks_the_hub(self) -> None:
        from vllm_omni.entrypoints.cli.serve import OmniServeCommand

        for given in ({"model_tag": "/nowhere", "model": "Qwen/Qwen3-0.6B"}, {"model": "/nowhere"}):
            with pytest.raises(H3QuantError, match=r"^model: /nowhere does not exist"):
                OmniServeCommand().validate(argparse.Namespace(**given, quantization="h3_fp8"))

    def test_one_line_and_a_status(self, capsys: pytest.CaptureFixture[str]) -> None:
        def fail() -> None:
            raise H3QuantError("a line\nand a second")

        with pytest.raises(SystemExit) as caught:
            around("main", fail)()
        assert caught.value.code == 1
        assert capsys.readouterr().err == "vllm: error: a line and a second\n"

    def test_other_errors_pass(self) -> None:
        def fail() -> None:
            raise ValueError("the engine's")

        with pytest.raises(ValueError, match="the engine's"):
            around("main", fail)()


class TestPython:
    def test_before_the_engine_asks_the_hub(self) -> None:
        from vllm_omni import AsyncOmni, Omni

        for engine in (Omni, AsyncOmni):
            with pytest.raises(H3QuantError, match=r"^model: /nowhere does not exist"):
                engine(model="/nowhere", quantization="h3_fp8")
        with pytest.raises(H3QuantError, match="did you mean 'h3_fp8'"):
            Omni("/nowhere", quantization="h3_fp9")

    def test_what_a_failed_start_is_explained_with(self) -> None:
        def check(arguments: Mapping[str, Any]) -> None:
            assert arguments["model"] == "/x"

        def start(self: Any, model: str, **kwargs: Any) -> None:
            raise OSError(kwargs["says"])

        init = startup._checked_engine(start, check, lambda arguments: "a line")
        with pytest.raises(H3QuantError, match=r"^a line$") as caught:
            init(None, "/x", says="Repo id")
        assert str(caught.value.__cause__) == "Repo id"
        init = startup._checked_engine(start, check, lambda arguments: None)
        with pytest.raises(OSError, match="Repo id"):
            init(None, model="/x", says="Repo id")


class TestThreads:
    """The orchestrator's thread puts its error into a future, logs it, raises it; another thread waits."""

    @staticmethod
    def failed(error: Exception) -> Future[None]:
        future: Future[None] = Future()
        around = RuntimeError(f"Orchestrator initialization failed: {error}")
        around.__cause__ = error
        future.set_exception(around)
        return future

    def raise_from(self, error: Exception) -> Any:
        def bootstrap(self: Any, timeout: int, future: Future[None]) -> None:
            raise error

        return bootstrap

    def test_only_who_waits_raises(self) -> None:
        error = H3QuantError("a line")
        future = self.failed(error)
        around("bootstrap", self.raise_from(error))(None, 1, future)

        def wait(self: Any, startup_future: Future[None], timeout: int) -> None:
            startup_future.result()

        with pytest.raises(H3QuantError, match=r"^a line$") as caught:
            around("wait", wait)(None, future, 1)
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__

    def test_an_error_that_nobody_waits_for_is_raised(self) -> None:
        ready: Future[None] = Future()
        ready.set_result(None)
        for future in (ready, Future(), self.failed(H3QuantError("another")), self.failed(ValueError("another"))):
            with pytest.raises(H3QuantError, match="a line"):
                around("bootstrap", self.raise_from(H3QuantError("a line")))(None, 1, future)

    def test_other_errors_pass(self) -> None:
        future = self.failed(ValueError("the engine's"))
        with pytest.raises(ValueError, match="the engine's"):
            around("bootstrap", self.raise_from(ValueError("the engine's")))(None, 1, future)
        with pytest.raises(RuntimeError, match="Orchestrator initialization failed"):
            around("wait", lambda self, future, timeout: future.result())(None, future, 1)

    def test_the_log_keeps_the_message_alone(self, caplog: pytest.LogCaptureFixture) -> None:
        for name in startup._LOGGERS:
            logger = logging.getLogger(name)
            logger.addHandler(caplog.handler)
            try:
                for error in (H3QuantError("a line"), ValueError("the engine's")):
                    caplog.clear()
                    logger.error("crashed", exc_info=error)
                    record = caplog.records[0]
                    assert record.getMessage() == "crashed"
                    assert bool(record.exc_info) == isinstance(error, ValueError)
            finally:
                logger.removeHandler(caplog.handler)


class TestWorker:
    """Its parent waits for a mapping through a pipe and looks at its status."""

    class Pipe:
        def __init__(self) -> None:
            self.sent: list[bytes] = []

        def send(self, value: Any) -> None:
            self.sent.append(pickle.dumps(value))

    def worker(self, error: Exception, pipe: Any) -> None:
        def worker_main(rank: int, od_config: Any, pipe_writer: Any, *more: Any) -> None:
            raise error

        around("worker", worker_main)(1, None, pipe, "handle")

    def test_the_parent_raises_what_the_worker_did(self) -> None:
        pipe = self.Pipe()
        with pytest.raises(SystemExit) as ended:
            self.worker(H3QuantError("a line"), pipe)
        assert ended.value.code == 1
        (sent,) = pipe.sent
        with pytest.raises(H3QuantError, match=r"^a line$"):
            pickle.loads(sent)["status"]

    def test_after_the_parent_has_gone_on(self) -> None:
        class Closed:
            def send(self, value: Any) -> None:
                raise BrokenPipeError

        with pytest.raises(H3QuantError, match="a line"):
            self.worker(H3QuantError("a line"), Closed())

    def test_other_errors_pass(self) -> None:
        pipe = self.Pipe()
        with pytest.raises(ValueError, match="the engine's"):
            self.worker(ValueError("the engine's"), pipe)
        assert pipe.sent == []

    def test_the_others_are_ended(self) -> None:
        """One ends by itself, one waits for a peer in its clean-up; a process of before is left alone."""
        spawn = multiprocessing.get_context("fork")
        mine = spawn.Process(target=time.sleep, args=(60,))
        ended, stuck = spawn.Process(target=time.sleep, args=(0.1,)), spawn.Process(target=_stays)
        mine.start()

        def launch_workers(self: Any) -> None:
            ended.start()
            stuck.start()
            time.sleep(0.5)  # for the signal's handler
            raise H3QuantError("a line")

        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(startup.end_processes, "__defaults__", (1.0,))
                with pytest.raises(H3QuantError, match="a line"):
                    startup._with_no_worker_left(launch_workers)(None)
            assert ended.exitcode == 0
            assert stuck.exitcode == -signal.SIGKILL
            assert mine.is_alive()
        finally:
            mine.kill()
            mine.join()

    def test_the_parent_reads_the_status(self) -> None:
        import inspect

        from vllm_omni.diffusion.executor.multiproc_executor import MultiprocDiffusionExecutor

        assert 'data["status"]' in inspect.getsource(MultiprocDiffusionExecutor._launch_workers)
        with pytest.raises(H3QuantError, match="a line"):
            Refusal("a line")["status"]


def _stays() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)


def test_only_what_was_raised_from_ours_is_ours() -> None:
    error = H3QuantError("a line")
    around = RuntimeError("engine")
    around.__cause__ = error
    assert ours(error) is ours(around) is error
    beside = RuntimeError("engine")
    beside.__context__ = error
    assert ours(beside) is None
    assert ours(None) is None
