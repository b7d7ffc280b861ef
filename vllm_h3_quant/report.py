"""What a load reports: linears, kernels and bytes of each component. Data only; reading it needs no engine."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict

REPORT_VARIABLE = "VLLM_H3_QUANT_REPORT"
"""Path of a JSON file that the first rank writes after loading."""


class ComponentReport(BaseModel):
    """Linears of one component on one rank.

    Attributes:
        linears: vLLM linears in the component.
        quantized: those that hold 8-bit codes.
        kernels: quantized linears by GEMM backend.
        weight_bytes: bytes of all linears' parameters: weights, scales and biases.
    """

    model_config = ConfigDict(frozen=True)

    linears: int
    quantized: int
    kernels: dict[str, int]
    weight_bytes: int


class LoadReport(BaseModel):
    """The components of a loaded pipeline, and the method that was asked for (None: none of ours)."""

    model_config = ConfigDict(frozen=True)

    method: str | None
    components: dict[str, ComponentReport]


def lines(report: LoadReport) -> list[str]:
    """One log line a component."""
    return [
        f"{name}: {part.quantized} of {part.linears} linears quantized"
        + (f" by {report.method} ({_kernels(part)})" if part.quantized else "")
        + f", {part.weight_bytes / 2**20:.1f} MiB of linear weights on this rank"
        for name, part in report.components.items()
    ]


def _kernels(part: ComponentReport) -> str:
    if len(part.kernels) == 1:
        return next(iter(part.kernels))
    return ", ".join(f"{count} {kernel}" for kernel, count in part.kernels.items())


def write_if_asked(report: LoadReport) -> None:
    """Write the report to the path in ``VLLM_H3_QUANT_REPORT``, if set."""
    path = os.environ.get(REPORT_VARIABLE)
    if path:
        Path(path).write_text(report.model_dump_json(indent=1) + "\n")
