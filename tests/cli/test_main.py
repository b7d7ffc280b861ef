"""The command line as a user meets it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from vllm_h3_quant.cli.main import app


def test_help_lists_the_subcommands() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert "demo" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "bf16,h3_fp9"], "did you mean 'h3_fp8'"),
        (["--size", "70"], "--size: 70"),
        (["--keep-model", __file__], "is no tiny H3 checkpoint"),
    ],
)
def test_bad_demo_arguments_end_in_one_line(arguments: list[str], message: str, tmp_path: object) -> None:
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path), *arguments])
    assert result.exit_code == 1
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("vllm-h3-quant demo: ")


def test_command_starts_without_torch_and_the_engine() -> None:
    """Their imports take seconds, and help and wrong arguments need neither."""
    check = "import sys, vllm_h3_quant.cli.main; print(sorted({'torch', 'vllm', 'matplotlib'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
