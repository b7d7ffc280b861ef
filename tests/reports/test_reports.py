"""Kinds of publicly reported faults of quantized diffusion models, replayed.

Replayed elsewhere: codes loaded without their scale and weights that arrive twice
(tests/methods/test_linear.py, tests/engine/test_load.py); scales cast to bf16 (test_linear.py); sizes that are no
multiple of 16, N-D inputs, tiny, zero and infinite rows (test_linear.py); FP8 on a GPU without it
(tests/methods/test_device.py); misspelt names (tests/config/test_schema.py, tests/engine/test_components.py); shards
with scales of their own (tests/e2e/test_two_ranks.py); column-major weights through layer-wise offload
(tests/e2e/test_python_api.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from vllm_h3_quant.engine.load_session import before_load
from vllm_h3_quant.engine.quant_config import build
from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.methods.base import H3LinearMethod
from vllm_h3_quant.testing.numeric import relative_l2

Load = Callable[..., Any]


def quantized(pipeline: torch.nn.Module) -> dict[str, Any]:
    return {n: m for n, m in pipeline.named_modules() if isinstance(getattr(m, "quant_method", None), H3LinearMethod)}


def test_a_loader_that_replaces_ours(load_pipeline: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm-omni PR 5737: the model's own weight loader stood in front of the online one, so that elements
    were missed. Every element of every quantized weight passes ours once."""
    from vllm_h3_quant.methods import arrival

    counted: dict[str, int] = {}
    load = arrival.Arrival._load

    def observed(self: Any, param_name: str, *args: Any) -> None:
        before = self._missing[param_name]
        load(self, param_name, *args)
        key = f"{self.name}.{param_name}"
        counted[key] = counted.get(key, 0) + before - self._missing[param_name]

    monkeypatch.setattr(arrival.Arrival, "_load", observed)
    for layer in quantized(load_pipeline("h3_fp8")).values():
        outputs, inputs = layer.output_size_per_partition, layer.input_size_per_partition
        assert counted[f"{layer.prefix}.weight"] == outputs * inputs


def test_activations_cast_to_the_storage_dtype(load_pipeline: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm-omni PR 5708: AdaLN cast its input to the dtype of a quantized weight."""
    transformer = load_pipeline("h3_fp8").transformer
    seen: list[torch.dtype] = []
    apply = H3LinearMethod.apply

    def observed(self: Any, layer: Any, x: torch.Tensor, bias: Any = None) -> torch.Tensor:
        seen.append(x.dtype)
        return apply(self, layer, x, bias)

    monkeypatch.setattr(H3LinearMethod, "apply", observed)
    width = transformer.blocks[0].adaln_proj.linear.input_size
    timesteps = torch.randn(2, width, generator=torch.Generator().manual_seed(0))
    for part in transformer.blocks[0].adaln_proj(timesteps):
        assert part.dtype is torch.bfloat16
    assert seen == [torch.bfloat16]


def test_a_flag_that_reaches_nothing() -> None:
    """vllm-omni PR 2920: 'FP8' ran in bf16, because the configuration never reached the constructors."""
    from types import SimpleNamespace

    config = build("h3_fp8", where="test")
    od_config = SimpleNamespace(
        quantization_config=config,
        diffusion_kv_cache_dtype=None,
        cache_config=None,
        dtype=torch.bfloat16,
        enable_broadcast_weight_load=False,
    )
    with pytest.raises(H3QuantError, match="h3_fp8 reached no linear of this model"):
        before_load([config], SimpleNamespace(od_config=od_config), torch.nn.Module())


@pytest.mark.parametrize("method", ["h3_fp8", "h3_int8"])
def test_sensitive_projections_are_close(load_pipeline: Load, method: str) -> None:
    """vllm-omni issue 2728: quantized modulation turned images to noise. H3's AdaLN is quantized per output
    channel and token; what comes out stays within quantization's own error of the unquantized projection."""
    names = ["blocks.0.adaln_proj", "final_layer.adaln_proj"]
    plain, ours = load_pipeline(None).transformer, load_pipeline(method).transformer
    for name in names:
        layer = plain.get_submodule(name)
        timesteps = torch.randn(3, layer.linear.input_size, generator=torch.Generator().manual_seed(1))
        expected = torch.cat(layer(timesteps), dim=-1)
        got = torch.cat(ours.get_submodule(name)(timesteps), dim=-1)
        # 3.7% of the product for FP8 (FACTS: two e4m3 operands), and the bias is exact.
        assert relative_l2(got, expected) < 0.05


def test_weights_in_host_memory_quantize_there() -> None:
    """vllm-omni PR 1473: CPU-resident weights called a CUDA-only operator."""
    from vllm_h3_quant.kernels.formats import FP8
    from vllm_h3_quant.kernels.quantize import quantize_rows

    codes, scale = quantize_rows(torch.randn(4, 64, generator=torch.Generator().manual_seed(0)), FP8)
    assert codes.device.type == scale.device.type == "cpu"


def test_layers_finish_in_any_order_of_files(load_pipeline: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks read their shards in an order of their own, so that nothing in a load may wait for another rank."""
    import torch.distributed

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a collective ran while weights were loaded")

    for name in ("all_reduce", "all_gather", "broadcast", "barrier", "all_gather_into_tensor"):
        monkeypatch.setattr(torch.distributed, name, refuse)
    assert len(quantized(load_pipeline("h3_int8"))) == 33
