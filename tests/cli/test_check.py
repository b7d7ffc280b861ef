"""``vllm-h3-quant check``: exit codes and what it says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from vllm_h3_quant.cli.main import app
from vllm_h3_quant.export.config import parse_request
from vllm_h3_quant.export.run import export
from vllm_h3_quant.loader.header import read_header
from vllm_h3_quant.tiny_h3.formats import write_format


def check(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["check", *map(str, arguments)])


def damage(root: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = next(iter(sorted((root / "FL2VA" / "transformer").glob("*.safetensors"))))
    tensors = load_file(file)
    change(tensors)
    file.unlink()  # it may be a link to the model that other tests read
    save_file(tensors, str(file))


def test_a_good_model(tiny_h3: Path) -> None:
    result = check(tiny_h3)
    assert result.exit_code == 0, result.output
    for said in ("MiniMax-H3 bf16", "Qwen3-VL bf16", "rows of qkv_proj by head", "h3_fp8", "h3_int8"):
        assert said in result.output


def uses(output: str, method: str) -> list[int]:
    """Codes as they are, quantized at load, kept as values: by a method's row, for each component."""
    rows = [line.split() for line in output.splitlines() if line.split()[:1] == [method]]
    return [int(cell) for row in rows for cell in row[1:]]


class TestReasons:
    """What a method would take, and why the others stay: what a load of the same files reports."""

    def test_of_the_model(self, tiny_h3: Path) -> None:
        output = check(tiny_h3 / "FL2VA" / "transformer").output
        assert uses(output, "h3_fp8") == uses(output, "h3_int8") == [0, 25, 6]
        assert output.count("kept as values: ") == 3, "once, although both methods keep them"
        assert "  kept as values: 2 fp32 in and out as the engine checks\n" in output

    def test_of_the_checkpoint(self, tiny_h3: Path, tmp_path: Path) -> None:
        output = check(write_format(tiny_h3, tmp_path / "h3", "modelopt_fp8_native") / "FL2VA" / "transformer").output
        assert uses(output, "h3_fp8") == [13, 0, 18]
        assert "  kept as values: 12 stored as values beside codes\n" in output

    def test_of_the_curve(self, tiny_h3: Path, tmp_path: Path) -> None:
        """Its AdaLN is served as it is, so that no method quantizes it."""
        output = check(write_format(tiny_h3, tmp_path / "h3", "pruned_curve") / "FL2VA" / "transformer").output
        assert sum(uses(output, "h3_fp8")[:2]) == 21
        assert "  kept as values: 4 AdaLN of the curve's few inputs\n" in output

    def test_of_the_text_encoder(self, tiny_h3: Path) -> None:
        output = check(tiny_h3 / "FL2VA" / "text_encoder").output
        assert uses(output, "h3_fp8") == [0, 8, 0]
        assert "kept as values: " not in output


def test_every_problem_is_listed(tiny_h3: Path, tmp_path: Path) -> None:
    root = write_format(tiny_h3, tmp_path / "h3", "modelopt_fp8_channel")

    def change(tensors: dict[str, torch.Tensor]) -> None:
        scales = sorted(name for name in tensors if name.endswith("weight_scale"))
        tensors[scales[0]][0] = 0.0
        tensors[scales[1]][0] = float("inf")
        tensors["transformer_blocks.0.attn.to_q.extra"] = torch.zeros(1)
        del tensors["context_embedder.bias"]

    damage(root, change)
    next((root / "FL2VA" / "transformer").glob("*.index.json")).unlink()  # it would be the first to notice
    result = check(root)
    assert result.exit_code == 1
    assert result.output.count("problem:") == 4
    for said in ("holds the scale 0.0", "holds the scale inf", "to_q.extra", "lacks 'condition_proj.bias'"):
        assert said in result.output
    assert "cannot be loaded" in result.output


def test_what_loads_but_lost_bits_is_noted(tiny_h3: Path, tmp_path: Path) -> None:
    root = write_format(tiny_h3, tmp_path / "h3", "modelopt_fp8_channel")
    damage(root, lambda tensors: tensors.update({"proj_out.bias": tensors["proj_out.bias"].bfloat16()}))
    next((root / "FL2VA" / "transformer").glob("*.index.json")).unlink()  # of the whole file's size
    result = check(root)
    assert result.exit_code == 0, result.output
    assert "note: " in result.output
    assert "in BF16, such as 'final_layer.video_out.bias': what was rounded away is lost" in result.output
    assert "codes as they are" in result.output


def test_nothing_that_could_be_a_model(tmp_path: Path) -> None:
    result = check(tmp_path)
    assert result.exit_code == 1
    assert "holds no transformer/ or text_encoder/" in result.output


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    result = check(tmp_path / "nothing")
    assert result.exit_code == 1
    assert "does not exist" in result.output


def test_a_wrong_place_is_told_with_the_right_one(tiny_h3: Path) -> None:
    """The root's ``transformer`` holds a configuration alone."""
    result = check(tiny_h3 / "transformer")
    assert result.exit_code == 1
    assert result.output.rstrip().endswith(f"; give {tiny_h3}")


class TestCurve:
    def test_is_not_good_by_itself(self, tiny_h3: Path, tmp_path: Path) -> None:
        root = write_format(tiny_h3, tmp_path / "h3", "pruned_curve")
        result = check(root)
        assert result.exit_code == 1
        assert "--against" in result.output

    @pytest.mark.parametrize(("name", "code"), [("pruned_curve", 0), ("pruned_curve_broken", 1)])
    def test_verdict_against_the_full_model(self, tiny_h3: Path, tmp_path: Path, name: str, code: int) -> None:
        root = write_format(tiny_h3, tmp_path / "h3", name)
        result = check(root, "--against", tiny_h3, "--every", 64)
        assert result.exit_code == code, result.output
        assert ("does NOT match" in result.output) == bool(code)

    def test_against_without_a_curve(self, tiny_h3: Path) -> None:
        result = check(tiny_h3, "--against", tiny_h3)
        assert result.exit_code == 1
        assert "is no pruned checkpoint" in result.output


class TestVerify:
    def test_a_flipped_bit(self, tiny_h3: Path, tmp_path: Path) -> None:
        root = tmp_path / "export"
        export(tiny_h3, root, parse_request("h3_fp8", where="test"))
        assert check(root, "--verify").exit_code == 0
        file = sorted((root / "FL2VA" / "transformer").glob("*.safetensors"))[-1]
        entry = list(read_header(file).entries.values())[3]
        with file.open("r+b") as stream:
            stream.seek(entry.start + entry.nbytes // 2)
            byte = stream.read(1)[0]
            stream.seek(-1, 1)
            stream.write(bytes([byte ^ 1]))
        assert check(root).exit_code == 0, "headers and scales are whole"
        result = check(root, "--verify")
        assert result.exit_code == 1
        assert f"{file.name}: the bytes of tensor {entry.name!r}" in result.output

    def test_a_model_without_a_manifest(self, tiny_h3: Path) -> None:
        result = check(tiny_h3, "--verify")
        assert result.exit_code == 1
        assert "manifest.json" in result.output
