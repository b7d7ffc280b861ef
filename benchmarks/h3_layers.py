"""Real layers of the engine, filled through their own weight loaders, for each method that is compared."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from harness.engine import process_groups
from shapes import BlockShape, Linear, Parallel
from torch.nn import Module

from vllm_h3_quant.config.schema import METHODS as PLAIN
from vllm_h3_quant.config.schema import NAMES as OURS
from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.kernels.formats import INT8, CodeFormat
from vllm_h3_quant.kernels.gemm import BACKENDS, Backend

STOCK = ("fp8", "int8")
UNFUSED = ":unfused"
"""What follows a method of this package to turn fusion off."""
METHODS = ("bf16", *STOCK, *(ours + more for ours in OURS for more in ("", UNFUSED)))
"""Unquantized, vLLM-Omni's own methods and those of this package, with and without 8-bit attention and fusion."""
ALL_METHODS = ",".join(m for m in METHODS if m not in (plain + UNFUSED for plain in PLAIN))
LINEAR_METHODS = ",".join(("bf16", *STOCK, *PLAIN))
"""Those whose linears differ."""


@contextmanager
def engine() -> Iterator[torch.device]:
    """One rank of the engine, with the configuration of a worker; yields its device."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm.config import set_current_vllm_config
    from vllm_omni.diffusion.data import OmniDiffusionConfig
    from vllm_omni.diffusion.vllm_config import create_diffusion_vllm_config
    from vllm_omni.platforms import current_omni_platform

    from vllm_h3_quant import plugin
    from vllm_h3_quant.methods.device import bind_engine_kernels

    plugin.register()
    device = current_omni_platform.get_torch_device(0)
    with process_groups():
        bind_engine_kernels()
        config = create_diffusion_vllm_config(device, OmniDiffusionConfig())
        with set_current_vllm_config(config), torch.no_grad():
            yield device


@contextmanager
def _building_on(device: torch.device) -> Iterator[None]:
    """The defaults in which the engine builds a model: layers read the output's dtype from them."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)


def check_methods(methods: str) -> tuple[str, ...]:
    """The methods in a list such as ``"bf16,h3_fp8"``.

    Raises:
        ValueError: a name that is none, twice the same, or one of the engine's that the environment
            serves with this package.
    """
    from vllm_h3_quant.config.names import REPLACE_VARIABLE, replaced

    names = tuple(methods.split(","))
    for name in names:
        if name not in METHODS:
            raise ValueError(f"unknown method {name!r}, choose from {', '.join(METHODS)}")
        if name in replaced():
            raise ValueError(f"{REPLACE_VARIABLE} serves {name!r} with this package: unset it to measure the engine's")
    if len(set(names)) < len(names):
        raise ValueError(f"a method is given twice in {methods!r}")
    return names


def refusal(method: str, device: torch.device) -> str | None:
    """Why ``method`` cannot run on ``device``; None when it can."""
    from vllm_h3_quant.engine.quant_config import build

    if method in STOCK and device.type != "cuda":
        return "vLLM-Omni serves it on CUDA only"
    if method.removesuffix(UNFUSED) in OURS:
        try:
            build(method.removesuffix(UNFUSED), where="benchmark")
        except H3QuantError as error:
            return str(error)
    return None


def backends_here(fmt: CodeFormat) -> list[Backend]:
    """The GEMM backends of ``fmt`` that run on this process's device, with those that the table keeps for others.

    INT8 kernels run from sm_80 on; their ranges in the table say where each is preferred.
    """
    from vllm_h3_quant.methods.device import device_capability

    capability = device_capability()

    def runs(backend: Backend) -> bool:
        if backend.refusal(capability) is None:
            return True
        anywhere = fmt is INT8 and capability is not None and capability >= (8, 0)
        return anywhere and backend.capabilities is not None and backend.missing() is None

    return [backend for backend in BACKENDS if backend.fmt is fmt and runs(backend)]


def linear_layer(linear: Linear, method: str, weight: torch.Tensor) -> Module:
    """The engine's layer of ``linear`` in ``method``, holding ``weight`` of shape ``(n, k)``.

    With tensor parallelism it is one rank's shard as a layer of its own: its product without the reduction.
    """
    from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear

    kind = ColumnParallelLinear if linear.parallel is Parallel.COLUMN else RowParallelLinear
    with _building_on(weight.device):
        layer = kind(
            linear.k,
            linear.n,
            bias=False,
            params_dtype=torch.bfloat16,
            quant_config=_quant_config(method),
            prefix=linear.layer,
            return_bias=False,
        )
        _load(layer, "weight", weight)
        _finish(layer)
    return layer


def block(shape: BlockShape, method: str | dict[str, Any], device: torch.device, **parallel: int) -> Module:
    """A ``MiniMaxH3DiTBlock`` in ``method``, a name or a configuration, with random weights that are always the same.

    Weights are normal with deviation ``k^-1/2`` and eight input channels six times as large; AdaLN's are
    scaled by 0.3, so that its scales stay around one. Biases are zero and norms one. ``parallel`` are degrees of the
    engine's parallelism, whose groups exist.
    """
    from vllm.model_executor.layers.linear import LinearBase
    from vllm_omni.diffusion.models.minimax_h3.minimax_h3_transformer import MiniMaxH3DiTBlock

    config = _quant_config(method)
    with engine_config(config, **parallel), _building_on(device):
        model = MiniMaxH3DiTBlock(arch(shape), config, prefix="blocks.0")
        linears = [(name, module) for name, module in model.named_modules() if isinstance(module, LinearBase)]
        generator = torch.Generator(device).manual_seed(0)
        for name, layer in linears:
            n, k = layer.weight.shape
            weight = outlier_weight(n, k, generator)
            if name.startswith("adaln_proj"):
                weight *= 0.3
            if name.endswith("fc1"):
                for shard, half in enumerate(weight.chunk(2)):
                    _load(layer, "weight", half, shard)
            else:
                _load(layer, "weight", weight)
            if layer.bias is not None:
                _load(layer, "bias", torch.zeros_like(layer.bias))
        for norm in (model.norm1, model.norm2, model.attn.q_norm, model.attn.k_norm):
            norm.weight.fill_(1.0)
        _finish(model)
    return model.eval()


@contextmanager
def engine_config(quant_config: Any, **parallel: int) -> Iterator[None]:
    """The engine's configuration of MiniMax-H3, from which attention layers learn what was asked of them."""
    from vllm_omni.diffusion.config import set_current_diffusion_config
    from vllm_omni.diffusion.data import DiffusionParallelConfig, OmniDiffusionConfig
    from vllm_omni.diffusion.forward_context import set_forward_context

    from vllm_h3_quant.engine.load_session import install
    from vllm_h3_quant.upstream.attention import MODEL_CLASSES

    install()
    config = OmniDiffusionConfig(
        model_class_name=MODEL_CLASSES[0],
        quantization_config=quant_config,
        parallel_config=DiffusionParallelConfig(**parallel),
    )
    with set_current_diffusion_config(config), set_forward_context(omni_diffusion_config=config):
        yield


def arch(shape: BlockShape) -> Any:
    """vLLM-Omni's architecture record of ``shape``."""
    from vllm_omni.diffusion.models.minimax_h3.minimax_h3_transformer import MiniMaxH3DiTArchConfig

    return MiniMaxH3DiTArchConfig(
        num_layers=1,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        attention_head_dim=shape.head_dim,
        ffn_hidden_size=shape.ffn,
        time_embed_dim=shape.time_embed,
        adaln_out_features=shape.adaln.n,
    )


def outlier_weight(n: int, k: int, generator: torch.Generator) -> torch.Tensor:
    """``(n, k)`` bf16 values of deviation ``k^-1/2``; the first eight input channels are six times as large."""
    weight = normal(n, k, generator) * k**-0.5
    weight = weight.bfloat16()
    weight[:, :8] *= 6
    return weight


def outlier_input(tokens: int, k: int, generator: torch.Generator) -> torch.Tensor:
    """``(tokens, k)`` bf16 values of deviation one; the first four channels are twenty times as large."""
    x = normal(tokens, k, generator).bfloat16()
    x[:, :4] *= 20
    return x


def normal(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(rows, columns, generator=generator, device=generator.device, dtype=torch.float32)


def kernel(layer: Module) -> str:
    """What computes the product of a linear, by the name that the engine or this package gives it."""
    method: Any = layer.quant_method
    if hasattr(method, "backend"):
        return str(method.backend.name)
    chosen = getattr(method, "fp8_linear", getattr(method, "int8_linear", None))
    return type(chosen or method).__name__


def attention_kernel(layer: Module) -> str:
    """What computes attention, by the name that this package or the engine gives it."""
    from vllm_h3_quant.attention.layers import decision_of

    found: Any = layer
    decision = decision_of(found)
    return decision.kernel if decision and decision.kernel else str(found.attn_backend.get_name())


def weight_mib(model: Module) -> float:
    """MiB of all parameters: codes, scales, biases and norms."""
    return sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20


def _quant_config(method: str | dict[str, Any]) -> Any:
    from vllm_omni.quantization import build_quant_config

    if isinstance(method, dict):
        return build_quant_config(method)
    if method.endswith(UNFUSED):
        return build_quant_config({"method": method.removesuffix(UNFUSED), "fuse": False})
    return None if method == "bf16" else build_quant_config(method)


def _load(layer: Module, parameter: str, tensor: torch.Tensor, *shard: int) -> None:
    # Looked up at each call: loading replaces parameters and their loaders.
    watch_bias = getattr(layer.quant_method, "watch_bias", None)
    if watch_bias is not None:
        watch_bias(layer)
    target = getattr(layer, parameter)
    target.weight_loader(target, tensor, *shard)


def _finish(model: Module) -> None:
    """The engine's last sweep over a loaded model."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_processing

    from vllm_h3_quant.upstream.model_loader import is_processed

    finalize_layerwise_processing(model, model_config=None)
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, QuantizeMethodBase) and not is_processed(layer):
            method.process_weights_after_loading(layer)
