"""The server's life: healthy, dead early, silent, and what is left of it afterwards. A small script plays vLLM."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import requests

from vllm_h3_quant.cli import server as module
from vllm_h3_quant.cli.server import Server, ServerError, exit_on_terminate, serving

HEALTHY = """
import http.server, os, signal, subprocess, sys
stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
worker = subprocess.Popen([sys.executable, "-c", stubborn])
print("worker", worker.pid, "token", os.environ.get("TOKEN"), "arguments", *sys.argv[1:], flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def log_message(self, *_): pass
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
DYING = """
import sys
print("loading")
print("(Worker pid=7) \\x1b[31mH3QuantError: unknown method 'h3_fp9'\\x1b[0m")
print("shutting down")
sys.exit(3)
"""
REFUSED = """
import sys
print("WARNING: this can cause errors like `OSError: [Errno 24] Too many open files`")
print("(APIServer pid=7) vllm: error: unknown method 'h3_fp9'", file=sys.stderr)
sys.exit(1)
"""
SILENT = "import time; print('still loading', flush=True); time.sleep(600)"


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Path]:
    """Writes a script that stands in for ``vllm`` and gives the path of the log."""

    def script(text: str) -> Path:
        file = tmp_path / f"vllm{len(list(tmp_path.glob('vllm*.py')))}.py"
        file.write_text(text)
        monkeypatch.setattr(module, "_vllm", lambda: [sys.executable, str(file)])
        return tmp_path / "server.log"

    return script


def alive(pid: int) -> bool:
    """Whether a process runs; one that ended and awaits its parent does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def assert_gone(server: Server) -> None:
    with pytest.raises(requests.ConnectionError):
        requests.get(f"{server.url}/health", timeout=5)


def test_server_is_healthy_inside_the_block_and_gone_with_its_workers_after(
    play: Callable[[str], Path], tmp_path: Path
) -> None:
    log = play(HEALTHY)
    server = Server(tmp_path, ["--quantization", "h3_fp8"], log=log, env={"TOKEN": "abc"})
    with serving(server):
        assert requests.get(f"{server.url}/health", timeout=5).ok
        assert server.start_seconds
        words = log.read_text().split()
        worker = int(words[1])
        assert alive(worker)
        assert words[3] == "abc"
        assert words[5:8] == ["serve", str(tmp_path), "--omni"]
        assert words[-2:] == ["--quantization", "h3_fp8"]
    assert_gone(server)
    deadline = time.monotonic() + 5
    while alive(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(worker)


def test_servers_start_side_by_side_on_ports_of_their_own(play: Callable[[str], Path], tmp_path: Path) -> None:
    play("import time; time.sleep(1.5)" + HEALTHY)
    servers = [Server(tmp_path, log=tmp_path / f"{index}.log") for index in range(3)]
    heard: list[Server] = []
    started = time.monotonic()
    with serving(*servers, on_healthy=heard.append):
        assert time.monotonic() - started < 4
        assert len({server.url for server in servers}) == 3
        assert sorted(map(id, heard)) == sorted(map(id, servers))
    for server in servers:
        assert_gone(server)


def test_one_dead_server_ends_the_others(play: Callable[[str], Path], tmp_path: Path) -> None:
    log = play(HEALTHY)
    good = Server(tmp_path, log=log)
    play(DYING)
    bad = Server(tmp_path, log=tmp_path / "bad.log")
    with pytest.raises(ServerError, match="unknown method 'h3_fp9'"), serving(good, bad):
        pytest.fail("the block must not run")
    assert_gone(good)


def test_failure_inside_the_block_still_ends_the_server(play: Callable[[str], Path], tmp_path: Path) -> None:
    server = Server(tmp_path, log=play(HEALTHY))
    with pytest.raises(KeyError), serving(server):
        raise KeyError("in the block")
    assert_gone(server)


def test_early_death_is_noticed_at_once_and_told_in_one_line(play: Callable[[str], Path], tmp_path: Path) -> None:
    log = play(DYING)
    started = time.monotonic()
    with pytest.raises(ServerError) as caught, serving(Server(tmp_path, log=log)):
        pytest.fail("the block must not run")
    assert time.monotonic() - started < 20
    assert str(caught.value) == (f"the server ended with status 3: H3QuantError: unknown method 'h3_fp9' (log: {log})")
    last = ("loading", "(Worker pid=7) H3QuantError: unknown method 'h3_fp9'", "shutting down")
    assert caught.value.log_tail == last


def test_our_own_line_is_told(play: Callable[[str], Path], tmp_path: Path) -> None:
    """The engine's log names other errors by the way."""
    says = "status 1: vllm: error: unknown method 'h3_fp9'"
    with pytest.raises(ServerError, match=says), serving(Server(tmp_path, log=play(REFUSED))):
        pytest.fail("the block must not run")


def test_silent_server_is_ended_after_the_timeout(play: Callable[[str], Path], tmp_path: Path) -> None:
    log = play(SILENT)
    with (
        pytest.raises(ServerError, match=r"not healthy after 1.5 s: still loading"),
        serving(Server(tmp_path, log=log), timeout=1.5),
    ):
        pytest.fail("the block must not run")
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    assert not [pid for pid in children if str(tmp_path).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_terminated_process_ends_its_server(play: Callable[[str], Path], tmp_path: Path) -> None:
    server = Server(tmp_path, log=play(HEALTHY))
    with pytest.raises(SystemExit) as caught, exit_on_terminate(), serving(server):
        signal.raise_signal(signal.SIGTERM)
    assert caught.value.code == 128 + signal.SIGTERM
    assert_gone(server)


def test_servers_have_ports_of_their_own_that_the_system_does_not_hand_out(
    play: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each engine would otherwise draw its rendezvous port from the range of outgoing connections."""
    monkeypatch.delenv("MASTER_PORT", raising=False)
    log = play("import os, sys; print('ports', sys.argv[sys.argv.index('--port') + 1], os.environ['MASTER_PORT'])")
    logs = [log.with_name(f"{index}.log") for index in range(3)]
    for server in [Server(Path("model"), log=one) for one in logs]:
        server.start()
        server.wait()
    ports = [int(port) for one in logs for port in one.read_text().split()[1:]]
    assert len(set(ports)) == 6
    assert all(20000 <= port < 32000 for port in ports)


def test_real_command_is_the_vllm_of_this_environment() -> None:
    command = module._vllm()
    assert Path(command[0]).parent == Path(sys.executable).parent
