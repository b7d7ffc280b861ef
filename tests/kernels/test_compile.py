"""The Triton kernels compile for each supported GPU generation on a machine without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(("capability", "kernels"), [(80, 2), (89, 4), (90, 4), (100, 4), (120, 4)])
def test_compiles_with_ieee_division(capability: int, kernels: int) -> None:
    script = Path(__file__).with_name("compile_for_nvidia.py")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(script), str(capability)], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == kernels
    for _, _, size, ieee, approximate in lines:
        assert int(size) > 0
        assert (ieee, approximate) == ("True", "False"), "codes must not depend on an approximate division"
