"""Starts the scripts of this folder, each in a process of its own with a time limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_h3_quant.engine.report import LoadReport
from vllm_h3_quant.fidelity.metrics import psnr_db

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Generated:
    """What came back of one run, what its load reported, and the log of its process."""

    arrays: dict[str, np.ndarray]
    report: LoadReport
    log: str

    @property
    def video(self) -> np.ndarray:
        return self.arrays["video0"]

    @property
    def audio(self) -> np.ndarray:
        return self.arrays["audio0"]

    @property
    def quantized(self) -> dict[str, int]:
        return {name: part.quantized for name, part in self.report.components.items()}

    def psnr(self, reference: Generated) -> float:
        return psnr_db(torch.from_numpy(self.video), torch.from_numpy(reference.video))


def environment(**more: str) -> dict[str, str]:
    """This process's environment as a user would have it: no interpreter for Triton."""
    inherited = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return {**inherited, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", **more}


def run(command: list[str], *, fails: bool = False, timeout: float = 280) -> str:
    """Run a command and return its output.

    Raises:
        AssertionError: it failed, or did not when ``fails`` is set; the output is in the message.
    """
    done = subprocess.run(
        command,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        cwd=HERE,
    )
    assert (done.returncode != 0) == fails, f"exit {done.returncode}: {done.stdout[-4000:]}"
    return done.stdout


def command(name: str) -> str:
    """A command of this environment, which need not be on the path."""
    return str(Path(sys.executable).with_name(name))


def script(name: str, *arguments: str, timeout: float = 280) -> str:
    """Run a script of this folder."""
    return run([sys.executable, str(HERE / name), *arguments], timeout=timeout)


def generate(model: Path, folder: Path, runs: dict[str, dict[str, Any]], timeout: float = 280) -> dict[str, Generated]:
    """One clip a run, all in one process; see ``generate.py``."""
    log = script("generate.py", str(model), str(folder), json.dumps(runs), timeout=timeout)
    clips = {}
    for name in runs:
        with np.load(folder / f"{name}.npz") as saved:
            arrays = dict(saved)
        report = LoadReport.model_validate_json((folder / f"{name}.json").read_text())
        clips[name] = Generated(arrays, report, log.split(f"## {name} starts")[1].split("## ")[0])
    return clips
