"""The example scripts without the engine: syntax, what they pass on, and what they refuse."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from clips import make_clip

from vllm_h3_quant.fidelity.clip import write_clip

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
ONLINE = EXAMPLES / "online_serving" / "minimax_h3"
SCRIPTS = sorted(ONLINE.glob("*.sh"))
OTHERS = [*sorted((ROOT / "benchmarks").glob("*.sh")), *sorted((ROOT / ".ci").iterdir())]
SERVERS = [script for script in SCRIPTS if script.name.startswith("run_server_")]


def run(script: Path, *arguments: str, timeout: int = 60, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a script with this interpreter first on the PATH and only the given settings."""
    path = f"{env.pop('PATH_FIRST', '')}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    settings = {"PATH": path, "HOME": os.environ.get("HOME", ""), "PYTHON": sys.executable, **env}
    return subprocess.run([script, *arguments], env=settings, capture_output=True, text=True, timeout=timeout)


def test_every_server_script_is_found() -> None:
    assert [script.name for script in SERVERS] == [
        "run_server_components.sh",
        "run_server_fp8.sh",
        "run_server_int8.sh",
        "run_server_offload.sh",
    ]


@pytest.mark.parametrize("script", [*SCRIPTS, *OTHERS], ids=lambda script: script.name)
def test_syntax_and_shellcheck(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True, timeout=30)
    shellcheck = Path(sys.executable).with_name("shellcheck")
    checked = subprocess.run([shellcheck, "-x", script], capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stdout


@pytest.fixture
def recorder(tmp_path: Path) -> Path:
    """A folder whose ``vllm`` prints its arguments, one a line."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "vllm").write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n')
    (folder / "vllm").chmod(0o755)
    return folder


@pytest.mark.parametrize("script", SERVERS, ids=lambda script: script.name)
def test_server_script_passes_its_settings_on_and_logs(
    script: Path, recorder: Path, tiny_h3: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "with space"
    settings = {"MODEL_ROOT": str(tiny_h3), "PORT": "8123", "RUN_DIR": str(run_dir), "PATH_FIRST": str(recorder)}
    done = run(script, "--host", "a b", **settings)
    assert done.returncode == 0, done.stderr
    given = done.stdout.splitlines()
    assert given[:4] == ["serve", str(tiny_h3), "--omni", "--trust-remote-code"]
    assert given[given.index("--port") + 1] == "8123"
    assert given[-2:] == ["--host", "a b"]
    quantized = [word for word in given if "h3_fp8" in word or "h3_int8" in word]
    assert len(quantized) == 1
    option = "--diffusion-quantization-config" if quantized[0].startswith("{") else "--quantization"
    assert given[given.index(quantized[0]) - 1] == option
    assert (run_dir / "server.log").read_text() == done.stdout


def test_component_json_can_be_replaced(recorder: Path, tiny_h3: Path, tmp_path: Path) -> None:
    config = '{"transformer": {"method": "h3_int8"}, "text_encoder": null}'
    settings = {"MODEL_ROOT": str(tiny_h3), "RUN_DIR": str(tmp_path), "PATH_FIRST": str(recorder)}
    done = run(ONLINE / "run_server_components.sh", QUANT_CONFIG=config, **settings)
    assert config in done.stdout.splitlines()


@pytest.mark.parametrize("script", SERVERS, ids=lambda script: script.name)
@pytest.mark.parametrize(
    ("settings", "message"),
    [({}, "MODEL_ROOT is not set"), ({"MODEL_ROOT": "/nowhere"}, "MODEL_ROOT=/nowhere has no model_index.json")],
)
def test_server_script_without_a_model_stops_in_one_line(
    script: Path, settings: dict[str, str], message: str, tmp_path: Path
) -> None:
    done = run(script, RUN_DIR=str(tmp_path / "run"), **settings)
    assert done.returncode != 0
    assert done.stderr.startswith(f"{script.name}: {message}")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


class Stub(BaseHTTPRequestHandler):
    """Healthy, and answers a request with ``status`` and ``body``."""

    status = 200
    body = b""
    received = b""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_POST(self) -> None:
        type(self).received = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def stub() -> Iterator[tuple[type[Stub], str]]:
    handler = type("OneTestStub", (Stub,), {})
    server = HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield handler, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def request(url: str, run_dir: Path, **env: str) -> subprocess.CompletedProcess[str]:
    clip = {"WIDTH": "48", "HEIGHT": "32", "NUM_FRAMES": "20", "ASPECT_RATIO": "4:3", "STEPS": "2"}
    return run(ONLINE / "run_curl_t2va.sh", BASE_URL=url, RUN_DIR=str(run_dir), **{**clip, **env})


def test_request_script_saves_and_validates_the_clip(stub: tuple[type[Stub], str], tmp_path: Path) -> None:
    handler, url = stub
    write_clip(tmp_path / "answer.mp4", make_clip())
    handler.body = (tmp_path / "answer.mp4").read_bytes()
    done = request(url, tmp_path / "run", PROMPT="@home; <now>")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run/t2va.mp4").read_bytes() == handler.body
    assert (tmp_path / "run/validation.txt").read_text() == done.stdout
    assert b'name="prompt"\r\n\r\n@home; <now>\r\n' in handler.received
    assert b'name="aspect_ratio"\r\n\r\n4:3\r\n' in handler.received


def test_request_script_fails_on_a_failed_check(stub: tuple[type[Stub], str], tmp_path: Path) -> None:
    handler, url = stub
    write_clip(tmp_path / "answer.mp4", make_clip())
    handler.body = (tmp_path / "answer.mp4").read_bytes()
    done = request(url, tmp_path / "run", NUM_FRAMES="40")
    assert done.returncode != 0
    assert "FAILED frames: 22 (wanted 56)" in (tmp_path / "run/validation.txt").read_text()


def test_request_script_tells_what_the_server_refused(stub: tuple[type[Stub], str], tmp_path: Path) -> None:
    handler, url = stub
    handler.status, handler.body = 400, b'{"detail": "aspect_ratio is required"}'
    done = request(url, tmp_path / "run")
    assert done.returncode != 0
    assert done.stderr == f"run_curl_t2va.sh: {url} answered 400: {handler.body.decode()}\n"
    assert not (tmp_path / "run/t2va.mp4").exists()


def test_request_script_gives_up_on_a_server_that_is_not_there(tmp_path: Path) -> None:
    done = request("http://127.0.0.1:9", tmp_path / "run", WAIT_S="1")
    assert done.returncode != 0
    assert done.stderr == "run_curl_t2va.sh: http://127.0.0.1:9 is not healthy after 1 s\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "has no model_index.json"),
        (("--quantization", "h3_fp8", "--quantization-config", "{}"), "not allowed with argument"),
        (("--quantization-config", "[1]"), "must be a JSON object, got [1]"),
        (("--quantization-config", "{"), "no JSON"),
    ],
)
def test_offline_example_refuses_bad_arguments_before_the_engine(
    arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    script = EXAMPLES / "offline_inference" / "t2va.py"
    command = [sys.executable, script, "--model", str(tmp_path), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert message in done.stderr
