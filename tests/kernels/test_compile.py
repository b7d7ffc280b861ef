"""The Triton kernels compile for each supported GPU generation on a machine without one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from engine_process import environment


@pytest.mark.parametrize(
    ("capability", "formats"),
    [(80, 1), (90, 2), *(pytest.param(other, 2, marks=pytest.mark.exhaustive) for other in (89, 100, 120))],
)
def test_compiles(capability: int, formats: int) -> None:
    script = Path(__file__).with_name("compile_for_nvidia.py")
    done = subprocess.run(
        [sys.executable, str(script), str(capability)], env=environment(), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    divisions = [line[3:] for line in lines if line[0] == "quantize"]
    assert divisions == [["True", "False"]] * 2 * formats, "scales must not depend on an approximate division"
    products = [line[2:] for line in lines if line[0] == "gemm"]
    assert products == [[str(capability == 90), "True"]] * formats, "the product must use the matrix units"
    assert len([line for line in lines if line[0] == "producer"]) == 3 * formats * (2 if capability == 90 else 1)
    attention = [line[1:] for line in lines if line[0] == "attention"]
    assert [line[0] for line in attention] == ["64", "128"]
    assert all(int(shared) <= 99 * 1024 for _, shared, *_ in attention), "the smallest GPUs have 99 KiB"
    # Matrix units of a warp group on Hopper; copies that run ahead; and, but for sm_100 whose scores lie elsewhere,
    # probabilities that do not travel between threads on the way to their product with V.
    assert [line[2:] for line in attention] == [[str(capability == 90), "True", str(capability == 100)]] * 2
    assert [line[2] for line in lines if line[0] == "codes"] == ["False"] * 2, "codes must not depend on contraction"
