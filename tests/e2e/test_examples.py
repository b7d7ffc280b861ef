"""The examples against the real engine and the tiny checkpoint."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from engine_process import environment

from vllm_h3_quant.fidelity.clip import read_clip
from vllm_h3_quant.fidelity.validate_clip import check_clip

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ONLINE = EXAMPLES / "online_serving" / "minimax_h3"
TINY_REQUEST = {
    "WIDTH": "64",
    "HEIGHT": "64",
    "ASPECT_RATIO": "1:1",
    "NUM_FRAMES": "96",
    "STEPS": "2",
    "WAIT_S": "300",
    "REQUEST_S": "120",
}


def settings(**more: str) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return environment(PATH=path, PYTHON=sys.executable, VLLM_NO_USAGE_STATS="1", **more)


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@contextmanager
def serving(script: str, **more: str) -> Iterator[None]:
    """Run a server script in a process group of its own, and end that group."""
    command = [ONLINE / script, "--host", "127.0.0.1", "--enforce-eager"]
    server = subprocess.Popen(
        command,
        env=settings(**more),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        server.terminate()
        try:
            server.wait(20)
        finally:
            with suppress(ProcessLookupError):  # all of them ended by themselves
                os.killpg(server.pid, signal.SIGKILL)


def by_name(method: str) -> Any:
    """What the demo's servers are too: one method for all components."""
    loaded = (f"transformer: 25 of 31 linears quantized by h3_{method}", "text_encoder: 8 of 8")
    return pytest.param(f"run_server_{method}.sh", loaded, marks=pytest.mark.exhaustive)


@pytest.mark.parametrize(
    ("script", "loaded"),
    [
        by_name("fp8"),
        by_name("int8"),
        (
            "run_server_offload.sh",
            ("transformer: 21 of 31", "text_encoder: 8 of 8", "Enabling offloader backend: LayerWiseOffloadBackend"),
        ),
        ("run_server_components.sh", ("transformer: 25 of 31", "text_encoder: 8 of 8")),
    ],
)
def test_server_and_request_scripts(script: str, loaded: tuple[str, ...], tiny_h3: Path, tmp_path: Path) -> None:
    port = free_port()
    with serving(script, MODEL_ROOT=str(tiny_h3), PORT=port, RUN_DIR=str(tmp_path)):
        done = subprocess.run(
            [ONLINE / "run_curl_t2va.sh"],
            env=settings(BASE_URL=f"http://127.0.0.1:{port}", RUN_DIR=str(tmp_path), **TINY_REQUEST),
            capture_output=True,
            text=True,
            timeout=500,
        )
    log = (tmp_path / "server.log").read_text()
    assert done.returncode == 0, f"{done.stdout}{done.stderr}{log[-3000:]}"
    assert (tmp_path / "validation.txt").read_text().count("ok ") == 9
    for line in loaded:
        assert line in log


def test_offline_example(tiny_h3: Path, tmp_path: Path) -> None:
    clip = tmp_path / "t2va.mp4"
    options = ["--width", "64", "--height", "64", "--aspect-ratio", "1:1", "--num-frames", "96", "--steps", "2"]
    config = '{"transformer": {"method": "h3_int8"}, "text_encoder": null}'
    command = [sys.executable, EXAMPLES / "offline_inference" / "t2va.py", "--model", tiny_h3, "--enforce-eager"]
    done = subprocess.run(
        [*command, "--quantization-config", config, "--out", clip, *options],
        env=settings(),
        capture_output=True,
        text=True,
        timeout=500,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-3000:]
    assert "transformer: 25 of 31 linears quantized by h3_int8" in output
    assert "text_encoder: 0 of 8" in output
    checks = check_clip(read_clip(clip), frames=96, fps=24, width=64, height=64)
    assert [check.name for check in checks if not check.passed] == []
