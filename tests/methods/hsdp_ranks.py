"""One rank of a small model under the engine's HSDP: what a linear sees before, in and after a forward."""

from __future__ import annotations

from typing import Any

import torch
from harness.engine import process_groups
from torch.distributed.tensor import DTensor
from torch.nn import Module, ModuleDict, ModuleList, Parameter
from vllm.model_executor.layers.linear import ColumnParallelLinear

from vllm_h3_quant.engine.quant_config import build

# (K, N) of a block's linears: rows that two ranks share evenly, unevenly, and of which one rank gets none.
SIZES = {"even": (64, 32), "odd": (24, 7), "single": (16, 1)}


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def linear(method: str, k: int, n: int) -> Any:
    """A loaded linear that holds every byte there is as a code, NaN's among them."""
    layer: Any = ColumnParallelLinear(
        k, n, bias=True, params_dtype=torch.bfloat16, quant_config=build(method, where="test"),
        prefix="condition_proj", return_bias=False,
    )  # fmt: skip
    layer.quant_method.watch_bias(layer)
    layer.bias.weight_loader(layer.bias, randn(n, seed=1))
    layer.weight.weight_loader(layer.weight, randn(n, k, seed=2))
    codes = layer.weight.data.t()
    codes.view(torch.uint8).copy_((torch.arange(codes.numel()) % 256).view(codes.shape))
    return layer


class Block(Module):
    """Linears, and parameters that are no codes; ``seen`` is what its last forward found in them."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.linears = ModuleDict({name: linear(method, k, n) for name, (k, n) in SIZES.items()})
        self.norm = Parameter(randn(5, seed=3), requires_grad=False)
        self.table = Parameter(randn(3, 2, seed=4).float(), requires_grad=False)
        self.seen: dict[str, torch.Tensor] = {}

    def forward(self) -> dict[str, torch.Tensor]:
        self.seen = {name: parameter.clone() for name, parameter in self.named_parameters()}
        return {name: layer(randn(3, layer.input_size, seed=5)) for name, layer in self.linears.items()}


class Dit(Module):
    """A sharded block, and a linear that the whole DiT gathers."""

    _hsdp_shard_conditions = (lambda name, module: isinstance(module, Block),)

    def __init__(self, method: str) -> None:
        super().__init__()
        self.blocks = ModuleList([Block(method)])
        self.condition_proj = linear(method, 40, 12)

    def forward(self) -> dict[str, torch.Tensor]:
        return {**self.blocks[0](), "root": self.condition_proj(randn(3, 40, seed=5))}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes, which are equal where NaN is not."""
    return tensor.detach().contiguous().view(torch.uint8)


def check(rank: int, port: int, methods: list[str]) -> None:
    """One of two ranks; an assertion that fails ends both."""
    with process_groups(rank=rank, hsdp=2, port=port), torch.no_grad():
        for method in methods:
            check_method(method, rank)


def check_method(method: str, rank: int) -> None:
    from vllm_omni.diffusion.distributed.hsdp import HSDPInferenceConfig, apply_hsdp_to_model

    model = Dit(method)
    expected = model()
    linears: list[Any] = [*model.blocks[0].linears.values(), model.condition_proj]
    for layer in linears:
        layer.quant_method.store_for_sharding(layer)
    whole = {name: parameter.clone() for name, parameter in model.named_parameters()}
    config = HSDPInferenceConfig(enabled=True, hsdp_replicate_size=1, hsdp_shard_size=2)
    apply_hsdp_to_model(model, config, target_device=torch.device("cpu"))

    def check_pieces() -> None:
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor), f"{name} is whole on each rank"
            pieces = (*whole[name].chunk(2), whole[name][:0])  # a single row has no second piece
            assert torch.equal(bits(parameter.to_local()), bits(pieces[rank])), name

    check_pieces()
    for _ in range(2):  # the second gathers into the storage of the first
        out = model()
        for name, tensor in expected.items():
            assert torch.equal(bits(out[name]), bits(tensor)), (method, name)
        for name, tensor in model.blocks[0].seen.items():
            before = whole[f"blocks.0.{name}"]
            assert tensor.dtype is before.dtype, f"{name} was cast"
            assert torch.equal(bits(tensor), bits(before)), name
        check_pieces()
