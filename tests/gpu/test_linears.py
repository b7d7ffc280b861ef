"""The linears at MiniMax-H3's real shapes on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.linear import ColumnParallelLinear

from vllm_h3_quant.config.schema import Method
from vllm_h3_quant.engine.quant_config import build
from vllm_h3_quant.kernels.gemm import BACKENDS, BF16, FP16, FP32
from vllm_h3_quant.kernels.gemm_library import scaled_gemm_reference
from vllm_h3_quant.kernels.product import Product
from vllm_h3_quant.kernels.quantize import quantize_rows_reference
from vllm_h3_quant.methods.device import bind_engine_kernels, device_capability
from vllm_h3_quant.methods.formats import FORMATS
from vllm_h3_quant.testing.numeric import relative_l2

# Name, K, N, and the tokens of a four-second clip; AdaLN runs on a few timestep rows.
SHAPES = {
    "blocks.0.attn.qkv_proj": (5376, 21504, 32704),
    "blocks.0.attn.out_proj": (7168, 5376, 32704),
    "blocks.0.mlp.fc1": (5376, 28672, 4099),
    "blocks.0.mlp.fc2": (14336, 5376, 4099),
    "blocks.0.adaln_proj.linear": (2688, 96768, 3),
    "condition_proj": (5120, 5376, 300),
    "token_refiner.blocks.0.mlp.fc2": (2520, 24, 17),
}
ERROR = {"h3_fp8": 0.05, "h3_int8": 0.017}  # derived in tests/methods/test_linear.py
METHODS = pytest.mark.parametrize("method", ["h3_fp8", "h3_int8"])


@pytest.fixture(autouse=True)
def engine(one_rank: Any) -> Iterator[None]:
    bind_engine_kernels()
    with set_current_vllm_config(one_rank), torch.device("cuda"):
        yield


def randn(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.bfloat16, device="cuda")


@METHODS
@pytest.mark.parametrize("name", SHAPES)
def test_real_shapes(method: str, name: str) -> None:
    k, n, tokens = SHAPES[name]
    layer = ColumnParallelLinear(
        k, n, bias=True, params_dtype=torch.bfloat16, quant_config=build(method, where="test"), prefix=name,
        return_bias=False,
    )  # fmt: skip
    layer.quant_method.watch_bias(layer)
    weight, bias = randn(n, k, seed=1) * k**-0.5, randn(n, seed=2)
    layer.bias.weight_loader(layer.bias, bias.cpu())
    layer.weight.weight_loader(layer.weight, weight.cpu())
    x = randn(tokens, k, seed=3)
    x[:, :: k // 7] *= 30  # outlier channels
    out = layer(x)

    fmt, rotation = FORMATS[Method(method)], layer.quant_method.rotation
    codes, scale = quantize_rows_reference(weight, fmt, rotation=rotation)
    assert torch.equal(layer.weight[:k, :n].t().contiguous().view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(layer.weight_scale[:, :n].t(), scale)

    rows = torch.randint(tokens, (257,), generator=torch.Generator("cuda").manual_seed(4))
    x_codes, x_scale = quantize_rows_reference(x[rows], fmt, rotation=rotation)
    same = (x_codes.double() @ codes.double().t()) * x_scale.double() * scale.double().t() + bias.double()
    # The product of the same codes: one bf16 rounding, 2^-9 at most; and Hopper keeps about 14 bits of a
    # running FP8 sum (DeepSeek-V3 report, arXiv 2412.19437).
    assert relative_l2(out[rows], same) < (0.006 if method == "h3_fp8" else 0.003)
    if method == "h3_int8" and rotation < 128:
        return  # too narrow a rotation for the outliers: the bound below does not hold
    exact = x[rows].double() @ weight.double().t() + bias.double()
    assert relative_l2(out[rows], exact) < ERROR[method]


@METHODS
@pytest.mark.parametrize(("inputs", "outputs"), [(256, 48), (5376, 1040)])
@pytest.mark.parametrize("tokens", [0, 1, 16, 17, 33])
def test_few_tokens(method: str, tokens: int, inputs: int, outputs: int) -> None:
    """AdaLN runs on a few rows, for which libraries have other kernels or none."""
    layer = ColumnParallelLinear(
        inputs, outputs, bias=True, params_dtype=torch.bfloat16, quant_config=build(method, where="test"),
        prefix="condition_proj", return_bias=False,
    )  # fmt: skip
    layer.quant_method.watch_bias(layer)
    weight, bias = randn(outputs, inputs, seed=1), randn(outputs, seed=3)
    layer.bias.weight_loader(layer.bias, bias)
    layer.weight.weight_loader(layer.weight, weight)
    x = randn(tokens, inputs, seed=2)
    out = layer(x)
    assert out.shape == (tokens, outputs)
    if tokens:
        assert relative_l2(out, x.double() @ weight.double().t() + bias.double()) < ERROR[method]


@METHODS
def test_past_two_to_the_31_elements(method: str) -> None:
    """15 seconds through fc1: 3.15e9 outputs, so that 32-bit offsets would wrap."""
    k, n, tokens = 5376, 28672, 109952
    layer = ColumnParallelLinear(
        k, n, bias=False, params_dtype=torch.bfloat16, quant_config=build(method, where="test"),
        prefix="blocks.0.mlp.fc1", return_bias=False,
    )  # fmt: skip
    weight = randn(n, k, seed=1)
    layer.weight.weight_loader(layer.weight, weight)
    x = randn(tokens, k, seed=2)
    out = layer(x)
    rows = torch.tensor([0, 1, 74898, 74899, 74900, 99999, tokens - 1])  # 74899 * 28672 passes 2^31
    assert relative_l2(out[rows], x[rows].double() @ weight.double().t()) < ERROR[method]


CUDA_BACKENDS = pytest.mark.parametrize("backend", [b for b in BACKENDS if b.capabilities], ids=lambda b: b.name)


@CUDA_BACKENDS
@pytest.mark.parametrize("rows", [1, 16, 17, 40, 513])
@pytest.mark.parametrize("out_dtype", [BF16, FP16, FP32], ids=str)
def test_every_backend_gives_the_reference(backend: Any, rows: int, out_dtype: torch.dtype) -> None:
    """Also those that the table keeps for other GPUs, as far as they run on this one."""
    capability = device_capability()
    if backend.missing() or out_dtype not in backend.out_dtypes or capability < backend.capabilities[0] < (10, 0):
        pytest.skip(str(backend.refusal(capability, out_dtype)))
    a, scale_a = quantize_rows_reference(randn(rows, 5376, seed=1), backend.fmt)
    b, scale_b = quantize_rows_reference(randn(1040, 5376, seed=2), backend.fmt)
    bias = randn(1040, seed=3) if backend.takes_bias else None
    product = Product(a, b.t(), scale_a, scale_b.t(), bias, out_dtype)
    out = backend.run(product)
    assert out.dtype is out_dtype
    in_fp32 = product._replace(out_dtype=FP32)
    # PyTorch has no exact INT8 product of this size on a GPU but in fp64.
    exact = backend.fmt.dtype is torch.int8
    expected = in_fp32.scale((a.double() @ b.double().t()).float()) if exact else scaled_gemm_reference(in_fp32)
    assert relative_l2(out, expected.double()) < 0.006


@METHODS
def test_fp32_activations(method: str) -> None:
    """No library kernel writes fp32 from these codes: they go through the Triton product."""
    layer = ColumnParallelLinear(
        5376, 1040, bias=True, params_dtype=torch.bfloat16, quant_config=build(method, where="test"),
        prefix="condition_proj", return_bias=False,
    )  # fmt: skip
    layer.quant_method.watch_bias(layer)
    weight, bias = randn(1040, 5376, seed=1), randn(1040, seed=3)
    layer.bias.weight_loader(layer.bias, bias)
    layer.weight.weight_loader(layer.weight, weight)
    x = randn(300, 5376, seed=2).float()
    out = layer(x)
    assert out.dtype is torch.float32
    assert relative_l2(out, x.double() @ weight.double().t() + bias.double()) < ERROR[method]
