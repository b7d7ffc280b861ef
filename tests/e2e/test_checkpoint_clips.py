"""Clips from every checkpoint format, all written from the weights of the tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_process import Generated, generate
from runs import RUNS

from vllm_h3_quant.tiny_h3.formats import write_format

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

ONLINE = ("bf16", "string_fp8", "string_int8", "full_int8")
"""Runs of the other clips' tests that these are compared with. They are made again: these tests run beside those."""


@pytest.fixture(scope="module")
def served(tiny_h3: Path, exports: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Generated]:
    folder = tmp_path_factory.mktemp("formats")
    runs: dict[str, dict[str, Any]] = {name: RUNS[name] | {"requests": 1} for name in ONLINE} | {
        name: {"model": str(write_format(tiny_h3, folder / name, name)), "arguments": {"quantization": method}}
        for name, method in FORMATS.items()
    }
    curve = write_format(tiny_h3, folder / "pruned_curve", "pruned_curve")
    runs["pruned_curve"] = {
        "model": str(curve),
        "arguments": {"quantization_config": {"method": FP8, "allow_unverified_curve": True}},
    }
    runs["full_adaln"] = {"arguments": {"quantization_config": {"method": FP8, "adaln": "keep"}}}
    runs["hosted_adaln"] = {
        "arguments": {
            "quantization_config": {"method": FP8, "adaln": "host"},
            "enable_distributed_layerwise_offload": True,
            "dlo_use_allgather": False,
            "pin_cpu_memory": False,
        },
        "requests": 2,
    }
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
def test_another_layout_of_the_same_values_changes_nothing(served: dict[str, Generated], name: str) -> None:
    assert same(served[name], served["string_fp8"])


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
    served: dict[str, Generated], export: str, online: str
) -> None:
    assert same(served[export], served[online])
    assert served[export].quantized == served[online].quantized
    for part in served[export].report.components.values():
        assert f"codes of {part.quantized} linears are used as they are, 0 are decoded" in part.checkpoint


def test_adaln_on_the_host_changes_nothing(served: dict[str, Generated]) -> None:
    """And no step of a request comes unannounced."""
    hosted, kept = served["hosted_adaln"], served["full_adaln"]
    for name, array in hosted.arrays.items():
        assert np.array_equal(array, kept.arrays[f"{name[:-1]}0"]), name
    part, whole = (clip.report.components["transformer"] for clip in (hosted, kept))
    assert part.hosted == 4
    assert part.weight_bytes < whole.weight_bytes - part.hosted_bytes + 4096
    assert "is in no schedule" not in hosted.log


ONE_MORE_ROUNDING = 4.0
"""dB. Codes that were rounded to another grid first have at most twice the error's power, 3 dB, and the clip of one
seed scatters by as much as 1."""

FOUR_BITS = 12.0
"""dB. e2m1 rounds weights of a normal distribution by 10 to 12% in blocks of 16, where e4m3 weights and activations
together make 3.7%: 20 log10(12 / 3.7) is 10.2, and the rounding to e4m3 and the scatter come on top."""


@pytest.mark.parametrize(
    ("name", "reference", "loss"),
    [
        ("comfy_fp8", "string_fp8", ONE_MORE_ROUNDING),
        ("comfy_int8_convrot", "string_int8", ONE_MORE_ROUNDING),
        ("modelopt_fp8_tensor", "string_fp8", ONE_MORE_ROUNDING),
        ("modelopt_fp8_channel", "string_fp8", ONE_MORE_ROUNDING),
        # INT8 from e4m3 codes is at least as far as e4m3 is.
        ("modelopt_fp8_native", "string_fp8", ONE_MORE_ROUNDING),
        ("fp8_block_native", "string_fp8", ONE_MORE_ROUNDING),
        ("modelopt_nvfp4", "string_fp8", FOUR_BITS),
    ],
)
def test_codes_of_another_format_are_as_close_to_bf16(
    served: dict[str, Generated], name: str, reference: str, loss: float
) -> None:
    """A row in the wrong place, or a scale that is left out, is a clip of noise: below 15 dB."""
    bf16 = served["bf16"]
    assert served[name].psnr(bf16) > served[reference].psnr(bf16) - loss


def test_a_good_curve_is_as_close_as_the_full_projections(served: dict[str, Generated]) -> None:
    """Rank 8 and bf16 weights cost less than the scatter of one seed."""
    bf16 = served["bf16"]
    assert served["pruned_curve"].psnr(bf16) > served["full_adaln"].psnr(bf16) - 1
