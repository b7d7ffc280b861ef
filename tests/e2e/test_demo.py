"""``vllm-h3-quant demo`` as a person runs it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from engine_process import command, environment

from vllm_h3_quant.fidelity.clip import read_clip
from vllm_h3_quant.fidelity.validate_clip import check_clip

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def demo(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    line = [command("vllm-h3-quant"), "demo", "--out", out, *arguments]
    return subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=580)


def test_demo_makes_three_clips_a_table_and_a_summary(tiny_h3: Path, tmp_path: Path) -> None:
    inode = tiny_h3.stat().st_ino
    done = demo(tmp_path, "--keep-model", str(tiny_h3), "--steps", "2")
    assert done.returncode == 0, done.stderr
    assert tiny_h3.stat().st_ino == inode, "the checkpoint was not reused"

    methods = {entry["method"]: entry for entry in json.loads((tmp_path / "summary.json").read_text())["methods"]}
    assert list(methods) == ["bf16", "h3_fp8", "h3_int8"]
    for method, entry in methods.items():
        checks = check_clip(read_clip(tmp_path / entry["file"]), frames=96, fps=24, width=64, height=64)
        assert [check.name for check in checks if not check.passed] == []
        quantized = {name: part["quantized"] for name, part in entry["linears"].items()}
        wanted = {"transformer": 0, "text_encoder": 0} if method == "bf16" else {"transformer": 25, "text_encoder": 8}
        assert quantized == wanted
        (row,) = (line for line in done.stdout.splitlines() if line.startswith(f"│ {method} "))
        assert f"transformer {wanted['transformer']}/31, text_encoder {wanted['text_encoder']}/8" in row
    for method in ("h3_fp8", "h3_int8"):
        assert methods[method]["weight_bytes"] < 0.6 * methods["bf16"]["weight_bytes"]
        # Two steps of three blocks: 8-bit rounding stays below a visible error, and is not nothing.
        assert 30 < methods[method]["psnr_db"] < 60
        assert 15 < methods[method]["audio_snr_db"] < 60
    assert (tmp_path / "grid.png").stat().st_size > 10_000


def test_server_that_does_not_start_ends_in_one_line(tmp_path: Path, tiny_h3: Path) -> None:
    """A checkpoint without its text encoder, under the stamp of a whole one."""
    import shutil

    broken = tmp_path / "model"
    shutil.copytree(tiny_h3, broken)
    shutil.rmtree(broken / "FL2VA" / "text_encoder")
    done = demo(tmp_path / "out", "--methods", "bf16", "--keep-model", str(broken))
    assert done.returncode == 1
    assert done.stderr.startswith("vllm-h3-quant demo: the server ended with status ")
    assert done.stderr.count("\n") == 1
    assert str(tmp_path / "out" / "bf16.log") in done.stderr
