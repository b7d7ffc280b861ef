"""The demo's arguments, its reading of load reports, and its comparison; no engine runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from clips import make_clip

from vllm_h3_quant.cli import demo_run
from vllm_h3_quant.cli.client import ClipRequest
from vllm_h3_quant.cli.demo_run import MethodRun, check_size, compare, parse_methods, write_summary
from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.fidelity.clip import write_clip


def test_reference_comes_first() -> None:
    assert parse_methods("h3_int8, bf16,h3_fp8") == ["bf16", "h3_int8", "h3_fp8"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bf16,h3_fp9", "unknown method 'h3_fp9'; did you mean 'h3_fp8'?"),
        ("bf16,,h3_fp8", "unknown method ''"),
        ("bf16,h3_fp8,h3_fp8", "'h3_fp8' is given more than once"),
        ("h3_fp8", "lacks 'bf16'"),
    ],
)
def test_methods_that_cannot_be_compared_are_refused(text: str, message: str) -> None:
    with pytest.raises(H3QuantError) as caught:
        parse_methods(text)
    assert message in str(caught.value)


@pytest.mark.parametrize(("size", "nearest"), [(0, 32), (-64, 32), (70, 64), (90, 96)])
def test_sizes_that_make_no_patches_are_refused(size: int, nearest: int) -> None:
    with pytest.raises(H3QuantError, match=f"--size: {size} .*nearest: {nearest}"):
        check_size(size)
    check_size(nearest)


def report(path: Path, method: str | None, quantized: int) -> Path:
    part = {"linears": 8, "quantized": quantized, "kernels": {"reference": quantized}, "weight_bytes": 1000}
    path.write_text(json.dumps({"method": method, "components": {"transformer": part, "text_encoder": part}}))
    return path


def test_report_gives_linears_and_the_sum_of_bytes(tmp_path: Path) -> None:
    path = report(tmp_path / "report.json", "h3_fp8", 7)
    linears = {"transformer": (7, 8), "text_encoder": (7, 8)}
    assert demo_run._read_report(path, "h3_fp8") == (linears, 2000)


@pytest.mark.parametrize(
    ("method", "loaded", "quantized", "message"),
    [
        ("h3_fp8", "h3_int8", 8, "loaded with 'h3_int8'"),
        ("h3_fp8", None, 0, "loaded with 'bf16'"),
        ("bf16", "h3_fp8", 8, "loaded with 'h3_fp8'"),
        ("h3_fp8", "h3_fp8", 0, "quantized none of the linears"),
    ],
)
def test_report_about_something_else_stops_the_demo(
    tmp_path: Path, method: str, loaded: str | None, quantized: int, message: str
) -> None:
    with pytest.raises(H3QuantError, match=message):
        demo_run._read_report(report(tmp_path / "report.json", loaded, quantized), method)


def test_missing_report_stops_the_demo(tmp_path: Path) -> None:
    with pytest.raises(H3QuantError, match="wrote no load report"):
        demo_run._read_report(tmp_path / "report.json", "h3_fp8")


def run_of(method: str, file: Path) -> MethodRun:
    return MethodRun(method, {"transformer": (0, 31)}, 1000, 1.0, 2.0, file)


def test_clips_are_compared_with_the_first(tmp_path: Path) -> None:
    clip = make_clip()
    write_clip(tmp_path / "bf16.mp4", clip)
    # Copied, since x264 with AVX-512 does not give the same bytes for the same frames on every machine.
    shutil.copy(tmp_path / "bf16.mp4", tmp_path / "h3_fp8.mp4")
    clip.frames[5:] //= 2
    clip.audio[:] *= 0.9
    write_clip(tmp_path / "h3_int8.mp4", clip)
    runs = [run_of(method, tmp_path / f"{method}.mp4") for method in ("bf16", "h3_fp8", "h3_int8")]
    fidelity = compare(runs, tmp_path / "grid.png")
    assert fidelity["h3_fp8"].psnr_db == float("inf")
    assert fidelity["h3_int8"].psnr_db < 15
    assert fidelity["h3_int8"].audio_snr_db == pytest.approx(20, abs=1)
    assert (tmp_path / "grid.png").stat().st_size > 1000

    write_summary(tmp_path / "summary.json", ClipRequest("a cat", 64, 64), runs, fidelity)
    summary: dict[str, Any] = json.loads((tmp_path / "summary.json").read_text(), parse_constant=pytest.fail)
    first, _, last = summary["methods"]
    assert first["psnr_db"] == "identical"
    assert last["audio_snr_db"] == pytest.approx(20, abs=1)
    assert last["file"] == "h3_int8.mp4"
    assert first["linears"]["transformer"] == {"quantized": 0, "linears": 31}


def test_clips_of_unequal_length_are_refused(tmp_path: Path) -> None:
    write_clip(tmp_path / "bf16.mp4", make_clip(frames=22))
    write_clip(tmp_path / "h3_fp8.mp4", make_clip(frames=39))
    runs = [run_of(method, tmp_path / f"{method}.mp4") for method in ("bf16", "h3_fp8")]
    with pytest.raises(ValueError, match="share one shape"):
        compare(runs, tmp_path / "grid.png")
