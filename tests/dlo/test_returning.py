"""A loaded layer's way back to the host."""

from __future__ import annotations

import gc

import pytest
import torch
from cuda_runtime import Runtime

from vllm_h3_quant.dlo import pages, returning
from vllm_h3_quant.dlo.returning import page_copy, return_to_host
from vllm_h3_quant.kernels.formats import FP8
from vllm_h3_quant.methods.lora import codes_parameter


@pytest.fixture(autouse=True)
def nothing_to_collect() -> None:
    """Pages are counted here, and garbage of other tests may go at any time."""
    gc.collect()


def codes(device: str = "cpu") -> torch.Tensor:
    """As a linear keeps them: a transposed view."""
    return torch.randn(48, 80, device=device).to(FP8.dtype).t()


def test_a_copy_keeps_strides_and_bytes() -> None:
    before = pages.held().own
    for tensor in (codes(), torch.randn(3, 5), torch.randn(7).bfloat16()):
        copy = page_copy(tensor, pinned=False)
        assert (copy.dtype, copy.shape, copy.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
        assert torch.equal(copy.float(), tensor.float())
        assert copy.data_ptr() != tensor.data_ptr()
    del copy
    gc.collect()
    assert pages.held().own == before


def test_pages_that_cuda_does_not_register(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime(error=2))
    tensor, before = torch.randn(3, 5), pages.held().pinned
    assert torch.equal(page_copy(tensor, pinned=True), tensor)
    assert pages.held().pinned == before


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [True, False])
def test_a_layer_is_on_the_host_in_pages_that_the_gpu_wrote(pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(returning, "SMALLEST", 1024)
    layer = torch.nn.Module()
    weight = codes("cuda")
    layer.register_parameter("weight", codes_parameter(weight, "layer"))
    layer.bias = torch.nn.Parameter(torch.randn(4, device="cuda"), requires_grad=False)
    layer.register_buffer("table", torch.randn(1024, device="cuda"))
    expected = {name: tensor.cpu() for name, tensor in (("weight", weight), ("table", layer.table))}
    kind = type(layer.weight)
    before = pages.held().pinned
    return_to_host(layer, pinned=pinned)
    assert {tensor.device.type for tensor in (layer.weight, layer.bias, layer.table)} == {"cpu"}
    assert type(layer.weight) is kind
    assert layer.weight.stride() == weight.stride()
    assert torch.equal(layer.weight.data.float(), expected["weight"].float())
    assert torch.equal(layer.table, expected["table"])
    assert pages.held().pinned - before == 2 * 4096 * pinned
    assert layer.weight.is_pinned() is pinned
