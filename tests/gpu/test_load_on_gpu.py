"""Loading two blocks of the real size onto a GPU: the codes, the peak, and an export of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from synthetic_h3 import write_synthetic_h3

from vllm_h3_quant.kernels.quantize import quantize_rows
from vllm_h3_quant.loader.architecture import Architecture
from vllm_h3_quant.loader.checkpoint import open_checkpoint
from vllm_h3_quant.loader.plan import plan_transformer
from vllm_h3_quant.methods.base import H3LinearMethod

LARGEST = 96768 * 2688 * 2
"""Bytes of an AdaLN projection in bf16."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    return write_synthetic_h3(tmp_path_factory.mktemp("synthetic") / "h3", layers=2)


def ours(pipeline: Any) -> dict[str, Any]:
    return {
        name: module
        for name, module in pipeline.named_modules()
        if isinstance(getattr(module, "quant_method", None), H3LinearMethod)
    }


@pytest.mark.parametrize("method", ["h3_fp8", "h3_int8"])
def test_codes_and_peak(load_pipeline: Callable[..., Any], model: Path, method: str) -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    pipeline = load_pipeline(method, model=model)
    torch.cuda.synchronize()
    over = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    assert over <= 1.1 * LARGEST
    plan = plan_transformer(open_checkpoint(model / "FL2VA" / "transformer"), Architecture(num_layers=2))
    for name, layer in ours(pipeline.transformer).items():
        stored = plan.linears[name]
        values = stored.values(0, stored.shape[0], torch.bfloat16).cuda()  # by the host's way of reading
        codes, scale = quantize_rows(values, layer.quant_method.fmt, rotation=layer.quant_method.rotation)
        assert torch.equal(layer.weight.data.t().view(torch.uint8), codes.view(torch.uint8)), name
        assert torch.equal(layer.weight_scale.data.t(), scale), name


def test_layers_return_to_the_host_as_they_finish(load_pipeline: Callable[..., Any], model: Path) -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    pipeline = load_pipeline("h3_fp8", model=model, enable_layerwise_offload=True)
    assert all(layer.weight.device.type == "cpu" for layer in ours(pipeline).values())
    # All else that is on the GPU meanwhile: the tiny text encoder and VAEs, the DiT's fp32 layers, norms and biases.
    rest = sum(p.nbytes for p in pipeline.parameters()) - sum(x.weight.nbytes for x in ours(pipeline).values())
    assert torch.cuda.max_memory_allocated() - before <= 1.1 * LARGEST + rest


def test_an_export_is_what_was_loaded(load_pipeline: Callable[..., Any], model: Path, tmp_path: Path) -> None:
    from vllm_h3_quant.export.config import parse_request
    from vllm_h3_quant.export.run import export

    export(model, tmp_path / "export", parse_request("h3_fp8", where="test"))
    online = {
        name: (x.weight.clone(), x.weight_scale.clone())
        for name, x in ours(load_pipeline("h3_fp8", model=model)).items()
    }
    stored = ours(load_pipeline(None, model=tmp_path / "export"))
    assert stored.keys() == online.keys()
    for name, (weight, scale) in online.items():
        assert torch.equal(stored[name].weight.view(torch.uint8), weight.view(torch.uint8)), name
        assert torch.equal(stored[name].weight_scale, scale), name
        assert stored[name].weight.stride() == weight.stride()
