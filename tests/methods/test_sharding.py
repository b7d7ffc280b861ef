"""Codes by rows are the codes that a product takes, and HSDP brings them back byte for byte."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import children
import hsdp_ranks
import pytest
import torch
from harness.engine import free_port
from torch.distributed.fsdp import fully_shard
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.linear import ColumnParallelLinear

from vllm_h3_quant.engine.quant_config import build
from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.kernels.quantize import quantize_rows
from vllm_h3_quant.kernels.rows import QuantizedRows
from vllm_h3_quant.methods import base

METHODS = pytest.mark.parametrize("method", ["h3_fp8", "h3_int8"])


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.fixture(autouse=True)
def engine(one_rank: Any) -> Iterator[None]:
    with set_current_vllm_config(one_rank):
        yield


def loaded(method: str, k: int = 256, n: int = 48, *, bias: bool = True) -> Any:
    layer: Any = ColumnParallelLinear(
        k, n, bias=bias, params_dtype=torch.bfloat16, quant_config=build(method, where="test"),
        prefix="condition_proj", return_bias=False,
    )  # fmt: skip
    if bias:
        layer.quant_method.watch_bias(layer)
        layer.bias.weight_loader(layer.bias, randn(n, seed=1))
    layer.weight.weight_loader(layer.weight, randn(n, k, seed=2))
    return layer


def by_rows(layer: Any) -> Any:
    layer.quant_method.store_for_sharding(layer)
    return layer


@METHODS
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("alignment", [1, 16])
@pytest.mark.parametrize(("k", "n"), [(256, 48), (2520, 56), (5, 3), (24, 1)])
def test_both_ways_are_views_of_the_same_bytes(
    method: str, bias: bool, alignment: int, k: int, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend_for = base.backend_for
    monkeypatch.setattr(
        base, "backend_for", lambda *args, **kwargs: replace(backend_for(*args, **kwargs), alignment=alignment)
    )
    layer = loaded(method, k, n, bias=bias)
    x = randn(9, k, seed=3)
    out, before, scale = layer(x), layer.weight, layer.weight_scale
    inputs, outputs = before.shape
    by_rows(layer)

    assert (tuple(layer.weight.shape), tuple(layer.weight_scale.shape)) == ((outputs, inputs), (outputs, 1))
    for parameter in layer.parameters():
        assert parameter.is_contiguous(), "FSDP2 refuses it"
        assert parameter.is_floating_point(), "the engine leaves it whole on every rank"
        assert not parameter.requires_grad
    weight, divisors = layer.quant_method.operands(layer)
    assert (weight.dtype, weight.shape, weight.stride()) == (before.dtype, before.shape, before.stride())
    assert (divisors.dtype, divisors.shape, divisors.stride()) == (scale.dtype, scale.shape, scale.stride())
    assert (weight.data_ptr(), divisors.data_ptr()) == (before.data_ptr(), scale.data_ptr()), "copied"
    assert torch.equal(layer(x), out)


@METHODS
def test_a_second_time_changes_nothing(method: str) -> None:
    """The engine may load weights again."""
    layer = by_rows(loaded(method))
    x = randn(4, 256, seed=3)
    before = layer(x)
    assert torch.equal(by_rows(layer)(x), before)


@METHODS
def test_rows_of_codes_are_taken_too(method: str) -> None:
    layer = loaded(method)
    row_format = layer.quant_method.row_format
    codes, scale = quantize_rows(randn(4, 256, seed=3), row_format.fmt, rotation=row_format.rotation)
    rows = QuantizedRows(codes, scale, torch.bfloat16, row_format)
    before = layer(rows)
    assert torch.equal(by_rows(layer)(rows), before)


@METHODS
def test_casts_and_copies_leave_codes_by_rows_alone(method: str) -> None:
    layer = by_rows(loaded(method))
    x = randn(4, 256, seed=3)
    before = layer(x)
    for other in (copy.deepcopy(layer), layer):
        other.half().bfloat16().to("cpu")
        assert torch.equal(other(x), before)


@METHODS
def test_no_lora_is_merged_into_codes_by_rows(method: str) -> None:
    layer = by_rows(loaded(method))
    before = layer.weight.data.view(torch.uint8).clone()
    for merge in (layer.weight.add_, layer.weight.copy_, lambda other: layer.weight.weight_loader(layer.weight, other)):
        with pytest.raises(H3QuantError, match=r"condition_proj\.weight holds 8-bit codes, no LoRA can be merged"):
            merge(randn(48, 256))
    assert torch.equal(layer.weight.data.view(torch.uint8), before)


@METHODS
def test_compiles_once_for_every_length(method: str) -> None:
    from torch._dynamo.testing import CompileCounter

    layer = by_rows(loaded(method))
    counter = CompileCounter()
    compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
    for tokens in (5, 33, 7):
        x = randn(tokens, 256, seed=tokens)
        assert torch.equal(compiled(x), layer(x))
    assert counter.frame_count == 1


@METHODS
def test_a_piece_is_not_taken_for_the_codes(method: str) -> None:
    """A linear that is called by itself gets no hook of HSDP's, so that its parameters are still pieces.

    A LoRA is not merged into those either: PyTorch refuses, of whatever dtype it is.
    """
    layer = by_rows(loaded(method))
    x = randn(4, 256, seed=3)
    expected = layer(x)
    block = torch.nn.Sequential(layer)
    fully_shard(block)
    with torch.no_grad():
        assert torch.equal(block(x), expected)
        block.reshard()
        with pytest.raises(H3QuantError, match=r"condition_proj holds one rank's piece of its codes.* forward of its"):
            layer(x)
        for weight in (layer.weight, layer.weight.data):
            for merge in (weight.add_, weight.copy_):
                with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
                    merge(randn(48, 256))


def test_codes_are_the_same_bytes_after_a_gather() -> None:
    port = free_port()
    children.run(hsdp_ranks.check, [(rank, port, ["h3_fp8", "h3_int8"]) for rank in (0, 1)])
