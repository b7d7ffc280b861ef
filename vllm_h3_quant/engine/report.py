"""What a load reports: linears, attention and bytes of each component. Data only; reading it needs no engine."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict

REPORT_VARIABLE = "VLLM_H3_QUANT_REPORT"
"""Path of a JSON file that the first rank writes after loading."""


class AttentionReport(BaseModel):
    """Attention layers of one component.

    Attributes:
        layers: the engine's attention layers in the component.
        quantized: those that run in 8 bits.
        kernels: 8-bit layers by backend.
        kept: layers that keep the engine's attention although 8 bits were asked for, by reason.
        why: why this kind, where ``auto`` chose; empty otherwise.
    """

    model_config = ConfigDict(frozen=True)

    layers: int = 0
    quantized: int = 0
    kernels: dict[str, int] = {}
    kept: dict[str, int] = {}
    why: str = ""


class EdgeReport(BaseModel):
    """Edges of one component's DiT blocks: where an activation goes from what produces it to a linear or attention.

    Attributes:
        edges: of all blocks in which fusion is asked for.
        fused: those on which codes travel.
        kept: edges that carry values, by their name and the reason.
    """

    model_config = ConfigDict(frozen=True)

    edges: int = 0
    fused: int = 0
    kept: dict[str, int] = {}


class ComponentReport(BaseModel):
    """One component on one rank.

    Attributes:
        linears: vLLM linears in the component.
        quantized: those that hold 8-bit codes.
        kernels: quantized linears by GEMM backend.
        kept: linears that stay values although a method was asked for, by reason.
        weight_bytes: bytes of all linears' parameters: weights, scales and biases.
        hosted: linears whose weights stay in host memory.
        hosted_bytes: bytes of those weights, which are none of ``weight_bytes``.
        attention: its attention layers.
        fusion: edges of its DiT blocks.
        checkpoint: what it was loaded from and how; empty where the engine loaded it by itself.
    """

    model_config = ConfigDict(frozen=True)

    linears: int
    quantized: int
    kernels: dict[str, int]
    weight_bytes: int
    hosted: int = 0
    hosted_bytes: int = 0
    kept: dict[str, int] = {}
    attention: AttentionReport = AttentionReport()
    fusion: EdgeReport = EdgeReport()
    checkpoint: str = ""


class LoadReport(BaseModel):
    """The components of a loaded pipeline, and the method that was asked for (None: none of ours)."""

    model_config = ConfigDict(frozen=True)

    method: str | None
    components: dict[str, ComponentReport]


def lines(report: LoadReport) -> list[str]:
    """A log line a component for its linears, one for its attention where 8 bits were asked for, one for fusion."""
    said = []
    for name, part in report.components.items():
        said.append(
            f"{name}: {part.quantized} of {part.linears} linears quantized"
            + (f" by {report.method} ({_kernels(part.kernels)})" if part.quantized else "")
            + f", {part.weight_bytes / 2**20:.1f} MiB of linear weights on this rank"
            + (f", {part.hosted_bytes / 2**20:.1f} MiB of {part.hosted} in host memory" if part.hosted else "")
            + (f"; as values: {_counted(part.kept)}" if part.kept else "")
        )
        if part.attention.quantized or part.attention.kept:
            said.append(f"{name}: {_attention(part.attention)}")
        if part.fusion.edges:
            said.append(f"{name}: {_fusion(part.fusion)}")
    return said


def _attention(part: AttentionReport) -> str:
    return (
        f"{part.quantized} of {part.layers} attention layers in 8 bits"
        + (f" ({_kernels(part.kernels)})" if part.quantized else "")
        + (f", auto: {part.why}" if part.why else "")
        + (f"; the engine's: {_counted(part.kept)}" if part.kept else "")
    )


def _fusion(part: EdgeReport) -> str:
    kept = f"; as values: {_counted(part.kept)}" if part.kept else ""
    return f"{part.fused} of {part.edges} edges of the blocks fused{kept}"


def _kernels(kernels: dict[str, int]) -> str:
    if len(kernels) == 1:
        return next(iter(kernels))
    return _counted(kernels)


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {what}" for what, count in counts.items())


def write_if_asked(report: LoadReport) -> None:
    """Write the report to the path in ``VLLM_H3_QUANT_REPORT``, if set."""
    path = os.environ.get(REPORT_VARIABLE)
    if path:
        Path(path).write_text(report.model_dump_json(indent=1) + "\n")
