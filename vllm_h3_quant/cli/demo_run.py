"""The demo's work: one clip a method from the real server, each compared with bf16."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_h3_quant.cli.client import ClipRequest, request_clip
from vllm_h3_quant.cli.server import Server, serving
from vllm_h3_quant.config.schema import NAMES
from vllm_h3_quant.errors import H3QuantError, unknown

if TYPE_CHECKING:
    from vllm_h3_quant.cli.progress import Steps
    from vllm_h3_quant.fidelity.clip import Clip

REFERENCE = "bf16"
_SIZE_STEP = 32  # 16 pixels a latent, 2 latents a patch
_SERVE_ARGUMENTS = ("--trust-remote-code", "--enforce-eager", "--task-type", "t2va")
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


@dataclass(frozen=True)
class MethodRun:
    """A clip that a method made, and what the engine reported while it loaded.

    Attributes:
        method: ``bf16`` or a method of this package.
        linears: component to (quantized, all) linears.
        weight_bytes: bytes of the linears of all components.
        start_seconds: from starting the server to a healthy one.
        request_seconds: from sending the request to having the clip.
        file: the MP4.
    """

    method: str
    linears: dict[str, tuple[int, int]]
    weight_bytes: int
    start_seconds: float
    request_seconds: float
    file: Path


@dataclass(frozen=True)
class Fidelity:
    """Distance of a clip from the bf16 one in dB; ``inf`` means identical."""

    psnr_db: float
    audio_snr_db: float


def parse_methods(text: str) -> list[str]:
    """Split a comma-separated list of methods; the reference comes first, whatever the order given.

    Raises:
        H3QuantError: an unknown or repeated method, or no ``bf16``, against which the others are compared.
    """
    methods = [part.strip() for part in text.split(",")]
    for method in methods:
        if method not in (REFERENCE, *NAMES):
            raise unknown("method", method, (REFERENCE, *NAMES), where="--methods")
    repeated = next((method for method in methods if methods.count(method) > 1), None)
    if repeated:
        raise H3QuantError(f"--methods: {repeated!r} is given more than once; name each method once")
    if REFERENCE not in methods:
        raise H3QuantError(f"--methods: {text!r} lacks {REFERENCE!r}, the reference of the comparison; add it")
    return [REFERENCE, *(method for method in methods if method != REFERENCE)]


def check_size(size: int) -> None:
    """Refuse a side length that H3 cannot cut into patches.

    Raises:
        H3QuantError: no positive multiple of 32.
    """
    if size < _SIZE_STEP or size % _SIZE_STEP:
        nearest = max(_SIZE_STEP, round(size / _SIZE_STEP) * _SIZE_STEP)
        raise H3QuantError(f"--size: {size} is no positive multiple of {_SIZE_STEP}; nearest: {nearest}")


def run_methods(methods: Sequence[str], model: Path, request: ClipRequest, out: Path, steps: Steps) -> list[MethodRun]:
    """Serve ``model`` with every method at once, and request one clip after another.

    Starting is imports on one core, so servers start side by side; requests are timed alone. ``out`` receives
    ``METHOD.mp4``, ``METHOD.log`` and ``METHOD.load.json``.

    Raises:
        ServerError, RequestError: a server or a request failed.
        H3QuantError: the engine's load report is missing or is about another method.
    """
    servers = {method: _server(method, model, out) for method in methods}
    names = {server: f"{method}: start the server" for method, server in servers.items()}
    for name in names.values():
        steps.begin(name)
    seconds = {}
    with serving(*servers.values(), on_healthy=lambda server: steps.end(names[server])):
        for method, server in servers.items():
            with steps.step(f"{method}: request a clip"):
                started = time.monotonic()
                request_clip(server.url, request, out / f"{method}.mp4")
                seconds[method] = time.monotonic() - started
    runs = []
    for method, server in servers.items():
        linears, weight_bytes = _read_report(_report(method, out), method)
        start_seconds = server.start_seconds or 0.0
        runs.append(MethodRun(method, linears, weight_bytes, start_seconds, seconds[method], out / f"{method}.mp4"))
    return runs


def _server(method: str, model: Path, out: Path) -> Server:
    report = _report(method, out)
    for stale in (out / f"{method}.mp4", report):
        stale.unlink(missing_ok=True)
    quantization = () if method == REFERENCE else ("--quantization", method)
    env = {
        **_OFFLINE,
        "VLLM_H3_QUANT_REPORT": str(report.resolve()),
        # Each server copies the checkpoint's code here before it imports it; two must not copy over each other.
        "HF_MODULES_CACHE": str((out / "modules" / method).resolve()),
    }
    return Server(model, (*_SERVE_ARGUMENTS, *quantization), log=out / f"{method}.log", env=env)


def _report(method: str, out: Path) -> Path:
    return out / f"{method}.load.json"


def _read_report(path: Path, method: str) -> tuple[dict[str, tuple[int, int]], int]:
    from vllm_h3_quant.engine.report import LoadReport

    if not path.exists():
        raise H3QuantError(f"{method}: the engine wrote no load report; are the plugins filtered by VLLM_PLUGINS?")
    report = LoadReport.model_validate_json(path.read_text())
    wanted = None if method == REFERENCE else method
    if report.method != wanted:
        raise H3QuantError(f"{method}: the engine loaded with {report.method or REFERENCE!r}, see {path}")
    parts = report.components
    linears = {name: (part.quantized, part.linears) for name, part in parts.items()}
    if wanted and not any(quantized for quantized, _ in linears.values()):
        raise H3QuantError(f"{method}: the engine quantized none of the linears, see {path}")
    return linears, sum(part.weight_bytes for part in parts.values())


def compare(runs: Sequence[MethodRun], sheet: Path) -> dict[str, Fidelity]:
    """Compare every clip with the first one, and save all of them on one contact sheet.

    Raises:
        ValueError: clips that cannot be read or whose shapes differ.
    """
    from vllm_h3_quant.fidelity.clip import read_clip
    from vllm_h3_quant.fidelity.contact_sheet import save_contact_sheet

    clips = {run.method: read_clip(run.file) for run in runs}
    save_contact_sheet(sheet, {method: clip.frames for method, clip in clips.items()})
    reference = clips[runs[0].method]
    return {method: _fidelity(clip, reference) for method, clip in clips.items()}


def _fidelity(clip: Clip, reference: Clip) -> Fidelity:
    import torch

    from vllm_h3_quant.fidelity.metrics import psnr_db, snr_db

    return Fidelity(
        psnr_db=psnr_db(torch.from_numpy(clip.frames), torch.from_numpy(reference.frames)),
        audio_snr_db=snr_db(torch.from_numpy(clip.audio), torch.from_numpy(reference.audio)),
    )


def write_summary(path: Path, request: ClipRequest, runs: Sequence[MethodRun], fidelity: dict[str, Fidelity]) -> None:
    """Write the table as JSON: the request, and one entry a method (infinity as the string ``identical``)."""
    entries = []
    for run in runs:
        distances = {
            name: "identical" if value == float("inf") else round(value, 3)
            for name, value in asdict(fidelity[run.method]).items()
        }
        linears = {name: {"quantized": done, "linears": of} for name, (done, of) in run.linears.items()}
        entries.append({**asdict(run), "file": run.file.name, "linears": linears, **distances})
    path.write_text(json.dumps({"request": asdict(request), "methods": entries}, indent=1) + "\n")
