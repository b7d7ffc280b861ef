"""Steps on a terminal and in a file."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from vllm_h3_quant.cli.progress import Steps


def shown(terminal: bool) -> str:
    output = io.StringIO()
    with Steps(Console(file=output, force_terminal=terminal, width=80)) as steps:
        steps.begin("bf16: start [server]")
        with steps.step("h3_fp8: start"):
            pass
        steps.end("bf16: start [server]")
    return output.getvalue()


def test_file_gets_plain_lines_in_order() -> None:
    text = re.sub(r"\d+\.\d s$", "TIME", shown(terminal=False), flags=re.MULTILINE)
    assert text.splitlines() == [
        "bf16: start [server] ...",
        "h3_fp8: start ...",
        "h3_fp8: start: TIME",
        "bf16: start [server]: TIME",
    ]


def test_terminal_gets_elapsed_time_while_a_step_runs() -> None:
    assert "0:00:00" in shown(terminal=True)


def test_failed_step_is_not_called_done() -> None:
    output = io.StringIO()
    with pytest.raises(KeyError), Steps(Console(file=output)) as steps, steps.step("start"):
        raise KeyError
    assert output.getvalue() == "start ...\n"
