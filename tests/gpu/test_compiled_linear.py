"""A quantized linear under torch.compile and in a CUDA graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.linear import ColumnParallelLinear

from vllm_h3_quant.engine.quant_config import build


def randn(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.bfloat16, device="cuda")


# Built on the device and run outside of that context, as in the engine: Dynamo cannot trace a parameter's subclass,
# vLLM's own included, while torch.device is entered.
@pytest.fixture(params=["h3_fp8", "h3_int8"])
def linear(request: pytest.FixtureRequest, one_rank: Any) -> ColumnParallelLinear:
    with set_current_vllm_config(one_rank), torch.device("cuda"):
        layer = ColumnParallelLinear(
            5376, 7168, bias=True, params_dtype=torch.bfloat16, quant_config=build(request.param, where="test"),
            prefix="condition_proj", return_bias=False,
        )  # fmt: skip
        layer.quant_method.watch_bias(layer)
        layer.bias.weight_loader(layer.bias, randn(7168, seed=1))
        layer.weight.weight_loader(layer.weight, randn(7168, 5376, seed=2))
    return layer


def test_one_compilation_serves_three_lengths(linear: ColumnParallelLinear) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(linear, fullgraph=True, dynamic=True, backend=counter)
    with torch.inference_mode():
        for tokens in (300, 513, 1024):
            x = randn(tokens, 5376, seed=tokens)
            assert torch.equal(compiled(x), linear(x))
    assert counter.frame_count == 1


def test_a_graph_replays_on_new_data(linear: ColumnParallelLinear) -> None:
    with torch.inference_mode():
        fixed = randn(513, 5376, seed=1)
        linear(fixed)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = linear(fixed)
        for seed in (5, 6):
            fixed.copy_(randn(513, 5376, seed=seed))
            graph.replay()
            assert torch.equal(captured, linear(fixed))
