"""The command line as a user meets it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from vllm_h3_quant.cli.main import app

SLOW = {"torch", "triton", "vllm", "vllm_omni", "transformers", "diffusers", "torchmetrics", "matplotlib", "scipy"}


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


def imported(*arguments: object) -> set[str]:
    """Which of the packages whose imports take seconds a command line brings into a process of its own."""
    code = (
        "import sys; from vllm_h3_quant.cli.main import app; app(sys.argv[1:], standalone_mode=False);"
        "print('imported', *{name.split('.')[0] for name in sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split()) & SLOW


@pytest.mark.parametrize("command", ["", *get_command(app).commands])
def test_help_needs_none_of_the_slow_imports(command: str) -> None:
    assert imported(*command.split(), "--help") == set()


def test_a_question_about_headers_needs_torch_alone(tiny_h3: Path) -> None:
    assert imported("check", tiny_h3) == {"torch", "triton"}


def test_a_comparison_of_clips_needs_no_engine(tmp_path: Path) -> None:
    code = (
        "import sys; import vllm_h3_quant.fidelity.metrics, vllm_h3_quant.fidelity.clip;"
        "import vllm_h3_quant.fidelity.contact_sheet;"
        "print(*{name.split('.')[0] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert set(done.stdout.split()) & SLOW == {"torch", "matplotlib"}
