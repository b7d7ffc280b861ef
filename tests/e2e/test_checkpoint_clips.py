"""Clips from every checkpoint format, all written from the weights of the tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_process import Generated, generate

from vllm_h3_quant.testing.tiny_h3.formats import write_format

FP8, INT8 = "h3_fp8", "h3_int8"

FORMATS: dict[str, str] = {
    "diffusers_bf16": FP8,
    "comfy_bf16": FP8,
    "comfy_fp8": FP8,
    "comfy_int8_convrot": INT8,
    "modelopt_fp8_tensor": FP8,
    "modelopt_fp8_channel": FP8,
    "modelopt_fp8_native": INT8,
    "modelopt_nvfp4": FP8,
    "fp8_block_native": FP8,
}
"""Formats and the method that each is served with."""


@pytest.fixture(scope="module")
def served(tiny_h3: Path, exports: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Generated]:
    folder = tmp_path_factory.mktemp("formats")
    runs: dict[str, dict[str, Any]] = {
        name: {"model": str(write_format(tiny_h3, folder / name, name)), "arguments": {"quantization": method}}
        for name, method in FORMATS.items()
    }
    curve = write_format(tiny_h3, folder / "pruned_curve", "pruned_curve")
    runs["pruned_curve"] = {
        "model": str(curve),
        "arguments": {"quantization_config": {"method": FP8, "allow_unverified_curve": True}},
    }
    runs["full_adaln"] = {"arguments": {"quantization_config": {"method": FP8, "adaln": "keep"}}}
    for method, root in exports.items():
        runs[f"export {method}"] = {"model": str(root)}
    runs["export layerwise"] = {
        "model": str(exports[FP8]),
        "arguments": {"enable_layerwise_offload": True, "pin_cpu_memory": False},
    }
    return generate(tiny_h3, tmp_path_factory.mktemp("served"), runs, timeout=500)


def same(one: Generated, other: Generated) -> bool:
    return all(np.array_equal(one.arrays[kind], other.arrays[kind]) for kind in ("video0", "audio0"))


@pytest.mark.parametrize("name", ["diffusers_bf16", "comfy_bf16"])
def test_another_layout_of_the_same_values_changes_nothing(
    served: dict[str, Generated], clips: dict[str, Generated], name: str
) -> None:
    assert same(served[name], clips["string_fp8"])


@pytest.mark.parametrize(
    ("export", "online"),
    [
        (f"export {FP8}", "string_fp8"),
        (f"export {INT8}", "string_int8"),
        ("export h3_int8_full", "full_int8"),
        ("export layerwise", "string_fp8"),
    ],
)
def test_an_export_is_served_without_a_flag_and_changes_nothing(
    served: dict[str, Generated], clips: dict[str, Generated], export: str, online: str
) -> None:
    assert same(served[export], clips[online])
    assert served[export].quantized == clips[online].quantized
    for part in served[export].report.components.values():
        assert f"codes of {part.quantized} linears are used as they are, 0 are decoded" in part.checkpoint
