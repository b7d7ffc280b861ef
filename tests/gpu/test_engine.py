"""The real engine with the tiny model on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_process import Generated, generate

RUNS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": {"arguments": {"quantization": "h3_fp8"}},
    "int8": {"arguments": {"quantization_config": {"transformer": "h3_int8", "text_encoder": "h3_fp8"}}},
    "compiled_fp8": {"arguments": {"quantization": "h3_fp8", "enforce_eager": False}},
    "compiled_int8": {"arguments": {"quantization": "h3_int8", "enforce_eager": False}},
    "full_fp8": {"arguments": {"quantization": "h3_fp8_full"}},
    "full_int8": {"arguments": {"quantization": "h3_int8_full", "enforce_eager": False}},
    "stock_fp8": {"arguments": {"quantization": "fp8"}},
}

# Five of the DiT's linears have a bias: condition_proj and AdaLN.
FP8_KERNELS = {"torch._scaled_mm row-wise": 20, "vLLM CUTLASS FP8": 5}


@pytest.fixture(scope="module")
def clips(tiny_h3: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Generated]:
    return generate(tiny_h3, tmp_path_factory.mktemp("clips"), RUNS, timeout=280)


@pytest.mark.parametrize(
    ("run", "kernels"),
    [
        ("fp8", FP8_KERNELS),
        ("int8", {"vLLM CUTLASS INT8": 25}),
        ("compiled_fp8", FP8_KERNELS),
        ("compiled_int8", {"vLLM CUTLASS INT8": 25}),
        ("full_fp8", FP8_KERNELS),
        ("full_int8", {"vLLM CUTLASS INT8": 25}),
    ],
)
def test_clip(clips: dict[str, Generated], run: str, kernels: dict[str, int]) -> None:
    assert clips[run].report.components["transformer"].kernels == kernels
    assert clips[run].quantized == {"transformer": 25, "text_encoder": 8}
    print(f"{run}: {clips[run].psnr(clips['bf16']):.1f} dB, stock fp8: {clips['stock_fp8'].psnr(clips['bf16']):.1f} dB")
    assert clips[run].psnr(clips["bf16"]) > 25


@pytest.mark.parametrize(
    ("run", "kernel"), [("full_fp8", "FlashAttention-3 FP8"), ("full_int8", "Triton INT8 attention, FP8 V")]
)
def test_attention_in_8_bits(clips: dict[str, Generated], run: str, kernel: str) -> None:
    attention = clips[run].report.components["transformer"].attention
    assert attention.kernels == {kernel: 3}
    assert attention.kept == {"token refiner, not asked for": 2}


def test_the_platform_is_cuda_and_ours_is_not_imported() -> None:
    import subprocess
    import sys

    code = (
        "import sys; from vllm_omni.platforms import current_omni_platform as p;"
        "print(p.is_cuda(), any(m.startswith('vllm_h3_quant.platforms') for m in sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout.split()[-2:] == ["True", "False"]
