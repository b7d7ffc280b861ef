"""AdaLN projections of a loaded model whose weights stay in host memory."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_h3_quant.dlo import pages
from vllm_h3_quant.dlo.adaln import HostedAdaln
from vllm_h3_quant.engine.survey import survey
from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.export.config import parse_request
from vllm_h3_quant.export.run import export
from vllm_h3_quant.methods.base import H3LinearMethod
from vllm_h3_quant.tiny_h3.formats import write_format
from vllm_h3_quant.upstream.platform import compute_device

HOST: dict[str, Any] = {"transformer": {"method": "h3_fp8", "adaln": "host"}}
KEEP: dict[str, Any] = {"transformer": {"method": "h3_fp8", "adaln": "keep"}}
Load = Callable[..., Any]


def outputs(pipeline: Any, *timesteps: float) -> list[torch.Tensor]:
    """Of all AdaLN projections of the DiT, as a forward asks for them."""
    dit = pipeline.transformer
    with torch.inference_mode():
        embedding = dit.time_embedder(torch.tensor(timesteps, device=compute_device()))
        dit.adaln_cache.prepare(embedding)
        layers = [*dit.blocks, dit.final_layer]
        return [part for layer in layers for part in layer.adaln_proj(embedding)]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def linears(pipeline: Any) -> list[Any]:
    dit = pipeline.transformer
    return [layer.adaln_proj.linear for layer in (*dit.blocks, dit.final_layer)]


def test_outputs_are_those_of_weights_on_the_device(load_pipeline: Load) -> None:
    kept = load_pipeline(KEEP)
    hosted = load_pipeline(HOST)
    for timesteps in ((0.1,), (0.1, 0.4), (0.0, 0.4, 0.999)):
        assert same(outputs(hosted, *timesteps), outputs(kept, *timesteps))


def test_weights_are_no_parameters_and_are_held_once(load_pipeline: Load) -> None:
    gc.collect()
    before = pages.held().own
    pipeline = load_pipeline(HOST)
    weights = [linear.weight for linear in linears(pipeline)]
    assert all(weight.dtype is torch.bfloat16 and weight.device.type == "cpu" for weight in weights)
    assert not [name for name, _ in pipeline.named_parameters() if "adaln_proj.linear" in name]
    nbytes = sum(weight.numel() * weight.element_size() for weight in weights)
    held = pages.held().own - before
    assert nbytes <= held <= nbytes + 4096 * len(weights)
    part = survey(pipeline, "h3_fp8").components["transformer"]
    assert (part.hosted, part.hosted_bytes, part.quantized) == (len(weights), nbytes, 21)
    del pipeline, weights
    gc.collect()
    assert pages.held().own == before


def test_some_of_them(load_pipeline: Load) -> None:
    """Those that ``ignored_layers`` names stay on the device, served by the engine's own cache."""
    only = {"transformer": HOST["transformer"] | {"ignored_layers": ["blocks.1.adaln_proj", "final_layer"]}}
    pipeline = load_pipeline(only)
    named = dict(pipeline.transformer.named_parameters())
    assert "blocks.1.adaln_proj.linear.weight" in named
    assert "blocks.0.adaln_proj.linear.weight" not in named
    assert same(outputs(pipeline, 0.1, 0.4), outputs(load_pipeline(KEEP), 0.1, 0.4))
    cache = pipeline.transformer.adaln_cache
    outputs(pipeline, 0.1, 0.4)
    assert (cache.passes, cache.rest.hits) == (1, 2)


def test_a_projection_that_is_called_by_itself(load_pipeline: Load) -> None:
    linear = linears(load_pipeline(HOST))[0]
    x = torch.randn(3, linear.input_size, dtype=torch.bfloat16, device=compute_device())
    expected = linears(load_pipeline(KEEP))[0](x)[0]
    assert torch.equal(linear(x)[0], expected)


def test_outputs_go_when_the_model_moves(load_pipeline: Load) -> None:
    pipeline = load_pipeline(HOST)
    cache: HostedAdaln = pipeline.transformer.adaln_cache
    outputs(pipeline, 0.1, 0.4)
    assert cache.nbytes
    pipeline.transformer.to("cpu")
    assert not cache.nbytes


@pytest.mark.parametrize(("exported", "served"), [("host", "host"), ("host", "keep"), ("keep", "host")])
def test_an_export_holds_the_values_of_both(
    load_pipeline: Load, tiny_h3: Path, tmp_path: Path, exported: str, served: str
) -> None:
    request = {"transformer": {"method": "h3_fp8", "adaln": exported}}
    export(tiny_h3, tmp_path / "out", parse_request(request, where="test"))
    config = {"transformer": {"method": "h3_fp8", "adaln": served, "checkpoint": "vllm-h3-quant"}}
    pipeline = load_pipeline(config, model=tmp_path / "out")
    assert isinstance(pipeline.transformer.adaln_cache, HostedAdaln) == (served == "host")
    assert same(outputs(pipeline, 0.1, 0.4), outputs(load_pipeline(KEEP), 0.1, 0.4))


@pytest.mark.parametrize("name", ["diffusers_bf16", "comfy_fp8"])
def test_other_formats(load_pipeline: Load, tiny_h3: Path, tmp_path: Path, name: str) -> None:
    model = write_format(tiny_h3, tmp_path / name, name)
    assert same(
        outputs(load_pipeline(HOST, model=model), 0.1, 0.4), outputs(load_pipeline(KEEP, model=model), 0.1, 0.4)
    )


def test_a_curve(load_pipeline: Load, tiny_h3: Path, tmp_path: Path) -> None:
    model = write_format(tiny_h3, tmp_path / "curve", "pruned_curve")
    host, keep = (
        {"transformer": {"method": "h3_fp8", "adaln": adaln, "allow_unverified_curve": True}}
        for adaln in ("host", "keep")
    )
    assert same(
        outputs(load_pipeline(host, model=model), 0.1, 0.4), outputs(load_pipeline(keep, model=model), 0.1, 0.4)
    )


def test_a_layer_that_returns_is_pinned_where_the_engine_may_pin(load_pipeline: Load) -> None:
    for may in (True, False):
        pipeline = load_pipeline(KEEP, pin_cpu_memory=may)
        methods = [getattr(module, "quant_method", None) for module in pipeline.transformer.modules()]
        assert {method.may_pin for method in methods if isinstance(method, H3LinearMethod)} == {may}


def test_weights_that_were_never_read(load_pipeline: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_omni.diffusion.models.minimax_h3.minimax_h3_transformer import MiniMaxH3DiTModel

    load = MiniMaxH3DiTModel.load_weights

    def forgetful(self: Any, weights: Any) -> set[str]:
        kept = ((name, tensor) for name, tensor in weights if not name.startswith("blocks.1.adaln_proj"))
        return load(self, kept) | {"blocks.1.adaln_proj.linear.weight", "blocks.1.adaln_proj.linear.bias"}

    monkeypatch.setattr(MiniMaxH3DiTModel, "load_weights", forgetful)
    with pytest.raises(H3QuantError, match=r"blocks\.1\.adaln_proj\.linear: adaln='host' needs the weight"):
        load_pipeline(HOST)
