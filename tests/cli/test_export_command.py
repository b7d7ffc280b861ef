"""``vllm-h3-quant export`` as a user meets it."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from vllm_h3_quant.cli.export import Bar
from vllm_h3_quant.cli.main import app
from vllm_h3_quant.tiny_h3 import TinyH3, write_tiny_h3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_h3(tmp_path_factory.mktemp("export-command") / "h3", TinyH3(layers=2, refiner_layers=1))


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


def written(out: Path) -> Any:
    return json.loads((out / "transformer" / "config.json").read_text())["quantization_config"]


def test_writes_a_model_and_says_what_it_is(model: Path, tmp_path: Path) -> None:
    """Not on a terminal: a line for each of two blocks and two decoder layers."""
    options = [
        "--option",
        "adaln=keep",
        "--option",
        'ignored_layers=["blocks.0"]',
        "--option",
        "attention_skip_layers=1",
    ]
    result = run(model, tmp_path / "out", "--method", "h3-int8-full", *options)
    assert result.exit_code == 0, result.output
    assert written(tmp_path / "out") == {
        "quant_method": "h3_int8",
        "ignored_layers": ["blocks.0"],
        "adaln": "keep",
        "attention": "auto",
        "attention_skip_layers": "1",
        "checkpoint": "vllm-h3-quant",
    }
    for told in ("Exporting: 1/4 layers, ", "Exporting: 4/4 layers, ", "FL2VA/transformer: MiniMax-H3 bf16, 9 of 22"):
        assert told in result.stdout
    assert result.stdout.splitlines()[-1].startswith(f"{tmp_path}/out: ")


def test_by_component(model: Path, tmp_path: Path) -> None:
    result = run(model / "FL2VA", tmp_path / "out", "--config", '{"transformer": "h3_fp8", "text_encoder": null}')
    assert result.exit_code == 0, result.output
    assert written(tmp_path / "out") == {
        "transformer": {"method": "h3_fp8", "checkpoint": "vllm-h3-quant"},
        "text_encoder": None,
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--method is missing; give one of h3_fp8, h3_int8"),
        (["--method", "h3_fp9"], "unknown method 'h3_fp9'; did you mean 'h3_fp8'"),
        (["--method", "h3_fp8", "--option", "adaln"], "--option 'adaln' is no key=value"),
        (["--method", "h3_fp8", "--option", "adaln=keep", "--option", "adaln=keep"], "is given twice"),
        (["--method", "h3_fp8", "--option", "ignored_layers=blocks.0"], "expected a list of names"),
        (["--method", "h3_fp8", "--config", '"h3_fp8"'], "leave --method and --option out"),
        (["--config", "h3_fp8"], "--config: 'h3_fp8' is no JSON"),
        (["--config", "5"], "5 is not a method name or a mapping with 'method'"),
    ],
)
def test_bad_arguments_end_in_one_line(model: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    result = run(model, tmp_path / "out", *arguments)
    assert result.exit_code == 1
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("vllm-h3-quant export: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("model_path", ["nothing", "elsewhere/FL2VA"])
def test_a_model_that_is_not_there(tmp_path: Path, model_path: str) -> None:
    result = run(tmp_path / model_path, tmp_path / "out", "--method", "h3_fp8")
    assert result.exit_code == 1
    assert f"{model_path} does not exist" in result.stderr


@pytest.mark.parametrize("place", ["..", "transformer", "FL2VA/transformer", "model_index.json"])
def test_a_wrong_place_is_told_with_the_right_one(model: Path, tmp_path: Path, place: str) -> None:
    """One level too high or too deep, or a file."""
    result = run(model / place, tmp_path / "out", "--method", "h3_fp8")
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert str(model) in result.stderr.rpartition("give ")[2]


def test_a_terminal_gets_layers_bytes_and_rate() -> None:
    output = io.StringIO()
    with Bar(Console(file=output, force_terminal=True, width=160)) as bar:
        bar.begin("Checking", 2**20, 0)
        bar.begin("Exporting", 2**30, 2)
        for _ in range(2):  # a rate takes two points in time
            time.sleep(0.01)
            bar.passed(2**28)
        bar.finished("a", True)
        bar.finished("b", False)
    text = output.getvalue()
    assert "Exporting 1/2 layers" in text
    assert "0.5/1.0 GiB" in text
    assert "B/s" in text
