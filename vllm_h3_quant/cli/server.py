"""Real ``vllm serve MODEL --omni`` processes, for as long as a ``with`` block lasts."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

import requests

_HOST = "127.0.0.1"
_PORTS = range(20000, 32000)
"""Below the ports that Linux hands out, from 32768."""
_POLL_S = 0.25
_STOP_GRACE_S = 20.0
_TAIL_LINES = 20
_ERROR_LINE = re.compile(r"\b(?:vllm: error|\w*(?:Error|Exception)): ")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class ServerError(RuntimeError):
    """A server that ended or stayed silent. The message is one line.

    Attributes:
        log_tail: the last lines of the server's log.
    """

    def __init__(self, message: str, log_tail: Sequence[str]) -> None:
        super().__init__(message)
        self.log_tail = tuple(log_tail)


class Server:
    """One HTTP server of the engine on a free local port, leader of a process group of its own.

    Args:
        model: folder of the checkpoint.
        arguments: further arguments of ``vllm serve``.
        log: file that receives the server's output.
        env: environment variables to set on top of this process's own.

    Attributes:
        url: such as ``http://127.0.0.1:41234``.
        start_seconds: from start to healthy, once :meth:`healthy` has been true.
    """

    def __init__(
        self, model: Path, arguments: Sequence[str] = (), *, log: Path, env: Mapping[str, str] | None = None
    ) -> None:
        # Bound until the start, so that two servers of one process never get the same ports.
        self._reservations = (_reserve_port(), _reserve_port())
        port, rendezvous = (reservation.getsockname()[1] for reservation in self._reservations)
        self.url = f"http://{_HOST}:{port}"
        self.start_seconds: float | None = None
        self._command = [*_vllm(), "serve", str(model), "--omni", "--host", _HOST, "--port", str(port), *arguments]
        self._log = log
        # The engine would draw its rendezvous port itself, long before it listens there.
        self._env = {**os.environ, "MASTER_PORT": str(rendezvous), **(env or {})}
        self._started = 0.0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process and return at once."""
        self._release_ports()
        self._started = time.monotonic()
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                self._command,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def healthy(self) -> bool:
        """Whether ``GET /health`` succeeds.

        Raises:
            ServerError: the process has ended.
        """
        try:
            answers = requests.get(f"{self.url}/health", timeout=5.0).ok
        except requests.RequestException:
            answers = False
        if answers and self.start_seconds is None:
            self.start_seconds = time.monotonic() - self._started
        code = self._process.poll() if self._process else None
        if code is not None:
            raise self.error(f"the server ended with status {code}")
        return answers

    def terminate(self) -> None:
        """Ask the process to end, and return at once."""
        self._release_ports()
        if self._process and self._process.poll() is None:
            self._process.terminate()

    def _release_ports(self) -> None:
        for reservation in self._reservations:
            reservation.close()

    def wait(self) -> None:
        """Wait for a terminated process, for 20 s at most, and kill what is left of its group."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_GRACE_S)
        # Workers that outlive the leader are still in its group; none left is the normal case.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def error(self, what: str) -> ServerError:
        """An error whose message is ``what``, the last error line of the log (else the last line), and the log."""
        lines = _COLOUR.sub("", self._log.read_text(errors="replace")).splitlines()
        telling = [line for line in lines if line.strip()]
        errors = [line[found.start() :] for line in telling if (found := _ERROR_LINE.search(line))]
        reason = (errors or telling or ["it wrote nothing"])[-1].strip()
        return ServerError(f"{what}: {reason} (log: {self._log})", telling[-_TAIL_LINES:])


def _unnoticed(server: Server) -> None:
    """The default of :func:`serving`: nobody waits to hear of it."""


@contextlib.contextmanager
def serving(
    *servers: Server, timeout: float = 600.0, on_healthy: Callable[[Server], None] = _unnoticed
) -> Iterator[None]:
    """Start servers side by side, run the block once all are healthy, and end all of them.

    Leaving the block, by whatever way, ends the process groups of these servers and nothing else.

    Args:
        servers: not yet started.
        timeout: seconds until all must be healthy.
        on_healthy: called with each server as it becomes healthy.

    Raises:
        ServerError: a server ended early or was not healthy in time.
    """
    try:
        for server in servers:
            server.start()
        _wait_until_healthy(servers, timeout, on_healthy)
        yield
    finally:
        for server in servers:
            server.terminate()
        for server in servers:
            server.wait()


def _wait_until_healthy(servers: Sequence[Server], timeout: float, on_healthy: Callable[[Server], None]) -> None:
    deadline = time.monotonic() + timeout
    waiting = list(servers)
    while waiting:
        for server in [server for server in waiting if server.healthy()]:
            waiting.remove(server)
            on_healthy(server)
        if waiting and time.monotonic() > deadline:
            raise waiting[0].error(f"the server was not healthy after {timeout:g} s")
        time.sleep(_POLL_S if waiting else 0)


@contextlib.contextmanager
def exit_on_terminate() -> Iterator[None]:
    """Turn SIGTERM into SystemExit while the block runs, so that a terminated process still ends its servers."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _reserve_port() -> socket.socket:
    """A socket bound to a free port that the system gives to nobody who asks for any port.

    A server listens seconds after its port is chosen; until then an outgoing connection or another engine could
    be given a port of the system's own range.
    """
    for port in random.sample(_PORTS, len(_PORTS)):
        reservation = socket.socket()
        try:
            reservation.bind((_HOST, port))
        except OSError:
            reservation.close()
            continue
        return reservation
    raise ServerError(f"no port from {_PORTS.start} to {_PORTS.stop - 1} is free", ())


def _vllm() -> list[str]:
    beside = Path(sys.executable).with_name("vllm")
    return [str(beside)] if beside.exists() else [sys.executable, "-m", "vllm.entrypoints.cli.main"]
