"""Loading the tiny pipeline through the engine's loader: streaming, checks, the report."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from vllm.model_executor.layers.linear import LinearBase

from vllm_h3_quant.engine import report
from vllm_h3_quant.engine.survey import survey
from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.kernels.formats import FP8
from vllm_h3_quant.kernels.quantize import quantize_rows_reference
from vllm_h3_quant.methods.base import H3LinearMethod
from vllm_h3_quant.tiny_h3 import write_tiny_h3

Load = Callable[..., Any]
METHODS = pytest.mark.parametrize("method", ["h3_fp8", "h3_int8"])


def transformer_files(root: Path) -> list[Path]:
    return sorted((root / "FL2VA" / "transformer").glob("*.safetensors"))


def checkpoint(root: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for path in transformer_files(root):
        with safe_open(path, "pt") as shard:
            tensors.update({name: shard.get_tensor(name) for name in shard.keys()})  # noqa: SIM118
    return tensors


@pytest.fixture
def own_model(tmp_path: Path) -> Path:
    """A checkpoint that the test may damage."""
    return write_tiny_h3(tmp_path / "h3")


def rewrite(root: Path, name: str, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Apply ``change`` to the tensors of the transformer shard that holds ``name``."""
    for path in transformer_files(root):
        with safe_open(path, "pt") as shard:
            if name not in shard.keys():  # noqa: SIM118
                continue
            tensors = {key: shard.get_tensor(key) for key in shard.keys()}  # noqa: SIM118
        change(tensors)
        save_file(tensors, str(path), metadata={"format": "pt"})


@METHODS
def test_every_layer_is_quantized_while_streaming(
    load_pipeline: Load, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No layer waits for the end, the five with a bias before their weight in the file included."""
    from vllm_omni.diffusion.models.minimax_h3.pipeline_minimax_h3 import MiniMaxH3Pipeline

    waiting: list[str] = []
    load_weights = MiniMaxH3Pipeline.load_weights

    def observed(self: Any, weights: Any) -> Any:
        loaded = load_weights(self, weights)
        waiting.extend(n for n, m in self.named_modules() if ours(m) and not m.quant_method.arrival.complete)
        return loaded

    monkeypatch.setattr(MiniMaxH3Pipeline, "load_weights", observed)
    pipeline = load_pipeline(method)
    assert waiting == []
    biased = [n for n, m in pipeline.named_modules() if ours(m) and getattr(m, "bias", None) is not None]
    assert len(biased) == 5


def ours(module: Any) -> bool:
    return isinstance(getattr(module, "quant_method", None), H3LinearMethod)


def test_large_weights_are_quantized_a_piece_at_a_time(load_pipeline: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values on the device are those of one piece, and the codes those of the whole weight."""
    from vllm_h3_quant.methods import arrival

    whole = load_pipeline("h3_int8")
    monkeypatch.setattr(arrival, "PIECE", 32 * 1024)
    largest = 0
    quantize = H3LinearMethod._quantize_values

    def observed(self: H3LinearMethod, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal largest
        largest = max(largest, values.nbytes)
        return quantize(self, values)

    monkeypatch.setattr(H3LinearMethod, "_quantize_values", observed)
    pieces = load_pipeline("h3_int8")
    assert 0 < largest <= 32 * 1024 + 2 * 5120, "a piece ends with a whole row"
    for (name, ours), other in zip(pieces.named_modules(), whole.modules(), strict=True):
        if isinstance(getattr(ours, "quant_method", None), H3LinearMethod):
            assert torch.equal(ours.weight, other.weight), name
            assert torch.equal(ours.weight_scale, other.weight_scale), name


def test_a_layer_waits_for_its_bias_in_whatever_order(load_pipeline: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read backwards, the checkpoint has each bias behind its weight: the layer then waits for it."""
    from vllm_omni.diffusion.model_loader.diffusers_loader import DiffusersPipelineLoader

    forwards = DiffusersPipelineLoader.get_all_weights
    process = H3LinearMethod.process_weights_after_loading
    biases: dict[str, torch.Tensor] = {}

    def backwards(self: Any, *args: Any, **kwargs: Any) -> Any:
        return reversed(list(forwards(self, *args, **kwargs)))

    def observed(self: Any, layer: Any) -> None:
        if getattr(layer, "bias", None) is not None and self.name not in biases:
            biases[self.name] = layer.bias.detach().clone()
        process(self, layer)

    monkeypatch.setattr(DiffusersPipelineLoader, "get_all_weights", backwards)
    monkeypatch.setattr(H3LinearMethod, "process_weights_after_loading", observed)
    transformer = load_pipeline("h3_fp8").transformer
    assert len(biases) == 5
    for name, bias in biases.items():
        assert torch.equal(transformer.get_submodule(name).bias, bias), f"{name} was quantized before its bias came"


def test_codes_are_those_of_the_checkpoint(load_pipeline: Load, tiny_h3: Path) -> None:
    """qkv rows are grouped by head in the file and by q, k, v in the model; scales follow them."""
    tensors = checkpoint(tiny_h3)
    pipeline = load_pipeline("h3_fp8")
    block = pipeline.transformer.blocks[1]
    heads, width = 2, 128
    grouped = tensors["blocks.1.attn.qkv_proj.weight"].view(heads, 3, width, -1)
    for layer, weight in (
        (block.attn.qkv_proj, grouped.transpose(0, 1).reshape(3 * heads * width, -1)),
        (block.mlp.fc1, tensors["blocks.1.mlp.fc1.weight"]),
        (block.adaln_proj.linear, tensors["blocks.1.adaln_proj.linear.weight"]),
    ):
        codes, scale = quantize_rows_reference(weight, FP8)
        assert torch.equal(layer.weight.t().contiguous().view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(layer.weight_scale.t(), scale)
    assert torch.equal(block.adaln_proj.linear.bias, tensors["blocks.1.adaln_proj.linear.bias"])


@METHODS
def test_what_stays_at_checkpoint_precision(load_pipeline: Load, tiny_h3: Path, method: str) -> None:
    tensors = checkpoint(tiny_h3)
    transformer = load_pipeline(method).transformer
    for name in ("video_patch_proj", "audio_patch_proj", "final_layer.video_out", "final_layer.audio_out"):
        layer = transformer.get_submodule(name)
        assert layer.weight.dtype is torch.float32
        assert torch.equal(layer.weight, tensors[f"{name}.weight"])
    assert transformer.rope.inv_freq.dtype is torch.float32


def test_components_are_quantized_apart(load_pipeline: Load) -> None:
    pipeline = load_pipeline({"text_encoder": {"method": "h3_int8"}})
    counts = {name: part.quantized for name, part in survey(pipeline, None).components.items()}
    assert counts == {"transformer": 0, "text_encoder": 8}


def test_report(load_pipeline: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: Any) -> None:
    path = tmp_path / "report.json"
    monkeypatch.setenv(report.REPORT_VARIABLE, str(path))
    with caplog.at_level(logging.INFO, logger="vllm_h3_quant"):
        logging.getLogger("vllm").addHandler(caplog.handler)
        pipeline = load_pipeline({"transformer": "h3_fp8", "text_encoder": "h3_int8"})
        logging.getLogger("vllm").removeHandler(caplog.handler)
    written = report.LoadReport.model_validate_json(path.read_text())
    transformer = written.components["transformer"]
    assert written.method == "h3_fp8+h3_int8"
    assert (transformer.linears, transformer.quantized) == (31, 25)
    assert sum(transformer.kernels.values()) == 25
    assert sum(transformer.kept.values()) == 6
    assert all("fp32" in reason for reason in transformer.kept)
    assert written.components["text_encoder"].kept == {}
    parameters = [
        p for m in pipeline.transformer.modules() if isinstance(m, LinearBase) for p in m.parameters(recurse=False)
    ]
    assert transformer.weight_bytes == sum(p.nbytes for p in parameters)
    assert "transformer: 25 of 31 linears quantized by" in caplog.text
    assert "on this rank; as values: 2 fp32 in and out as the engine checks, 2 fp32: " in caplog.text


def test_every_linear_that_stays_has_its_reason(load_pipeline: Load) -> None:
    """Of the model alone: what was asked for, and what no method takes."""
    keys = {"ignored_layers": ["blocks.0.mlp", "condition_proj"], "adaln": "host"}
    part = survey(load_pipeline({"transformer": {"method": "h3_int8", **keys}}), None).components["transformer"]
    entries = {"ignored_layers entry 'blocks.0.mlp'": 2, "ignored_layers entry 'condition_proj'": 1}
    assert {reason: count for reason, count in part.kept.items() if "fp32" not in reason} == entries
    assert part.quantized + part.hosted + sum(part.kept.values()) == part.linears
    assert (part.quantized, part.hosted) == (18, 4)


class TestAttention:
    """8-bit attention, asked for in each of the two places."""

    def reported(self, monkeypatch: pytest.MonkeyPatch, path: Path, load: Callable[[], Any]) -> report.LoadReport:
        monkeypatch.setenv(report.REPORT_VARIABLE, str(path / "report.json"))
        load()
        return report.LoadReport.model_validate_json((path / "report.json").read_text())

    def test_the_report_counts_layers_and_names_the_kernel(
        self, load_pipeline: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        config = {"transformer": {"method": "h3_int8_full", "attention_skip_layers": [1]}, "text_encoder": "h3_fp8"}
        written = self.reported(monkeypatch, tmp_path, lambda: load_pipeline(config))
        attention = written.components["transformer"].attention
        assert (attention.layers, attention.quantized) == (5, 2)
        assert sum(attention.kernels.values()) == 2
        assert attention.kept == {"skipped by selector": 1, "token refiner, not asked for": 2}
        assert attention.why
        assert written.components["text_encoder"].attention == report.AttentionReport()
        assert f"{attention.why}; the engine's: " in report.lines(written)[1]

    def test_the_engines_option_without_a_configuration(
        self, load_pipeline: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        from vllm_h3_quant.plugin import register_general

        register_general()
        option = {"diffusion_kv_cache_dtype": "fp8", "diffusion_kv_cache_skip_layers": "0-1"}
        written = self.reported(monkeypatch, tmp_path, lambda: load_pipeline(None, **option))
        attention = written.components["transformer"].attention
        assert written.method is None
        assert written.components["transformer"].quantized == 0
        assert (attention.quantized, attention.why) == (1, "")

    def test_an_engine_without_it_after_one_with_it(
        self, load_pipeline: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        load_pipeline("h3_fp8_full")
        written = self.reported(monkeypatch, tmp_path, lambda: load_pipeline(None))
        assert written.method is None
        assert [part.attention.quantized for part in written.components.values()] == [0, 0]

    def test_a_block_that_is_not_there(self, load_pipeline: Load, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm_omni.diffusion.model_loader.diffusers_loader import DiffusersPipelineLoader

        monkeypatch.setattr(
            DiffusersPipelineLoader, "get_all_weights", lambda *a, **k: pytest.fail("weights were read")
        )
        with pytest.raises(H3QuantError, match="attention_skip_layers names block 9, the nearest of this model is 2"):
            load_pipeline({"method": "h3_fp8_full", "attention_skip_layers": "0,9"})


@METHODS
def test_hsdp_shards_the_codes_of_the_dit(load_pipeline: Load, method: str) -> None:
    """By rows in the DiT and nowhere else; what the engine leaves out of the shards included."""
    from torch.distributed.tensor import DTensor
    from vllm_omni.diffusion.data import DiffusionParallelConfig

    hsdp = DiffusionParallelConfig(use_hsdp=True, hsdp_shard_size=1)
    plain, sharded = load_pipeline(method), load_pipeline(method, parallel_config=hsdp)
    for name, layer in plain.named_modules():
        if not isinstance(getattr(layer, "quant_method", None), H3LinearMethod):
            continue
        other = sharded.get_submodule(name)
        in_dit = name.startswith("transformer.")
        assert isinstance(other.weight, DTensor) == (in_dit and "final_layer" not in name), name
        weight = other.weight.to_local() if isinstance(other.weight, DTensor) else other.weight
        weight = weight.t() if in_dit else weight
        assert weight.stride() == layer.weight.stride(), name
        assert torch.equal(weight.view(torch.uint8), layer.weight.view(torch.uint8)), name


class TestRefusals:
    def test_an_entry_that_matches_nothing(self, load_pipeline: Load) -> None:
        config = {"method": "h3_fp8", "ignored_layers": ["blocks.0.attn", "blocks.0.attn.q_proj"]}
        with pytest.raises(H3QuantError, match=r"'blocks\.0\.attn\.q_proj' .*did you mean 'blocks\.0\.attn\.qkv_proj'"):
            load_pipeline(config)

    def test_an_entry_with_its_component_in_front(self, load_pipeline: Load) -> None:
        """By spelling alone the nearest name is in the token refiner."""
        config = {"method": "h3_fp8", "ignored_layers": ["transformer.blocks.*.attn"]}
        with pytest.raises(H3QuantError, match=r"did you mean 'blocks\.\*\.attn'\?"):
            load_pipeline(config)

    def test_an_entry_inside_another_component(self, load_pipeline: Load) -> None:
        config = {"text_encoder": {"method": "h3_fp8", "ignored_layers": ["blocks.0.attn"]}}
        with pytest.raises(H3QuantError, match=r"component 'text_encoder'.*'blocks\.0\.attn' matches no linear"):
            load_pipeline(config)

    def test_no_weight_is_read_before(self, load_pipeline: Load, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm_omni.diffusion.model_loader.diffusers_loader import DiffusersPipelineLoader

        monkeypatch.setattr(
            DiffusersPipelineLoader, "get_all_weights", lambda *a, **k: pytest.fail("weights were read")
        )
        with pytest.raises(H3QuantError, match="matches no linear"):
            load_pipeline({"method": "h3_fp8", "ignored_layers": ["nothing"]})

    def test_codes_without_their_scales(self, load_pipeline: Load, own_model: Path) -> None:
        name = "blocks.0.mlp.fc2.weight"

        def encode(tensors: dict[str, torch.Tensor]) -> None:
            tensors[name] = (tensors[name].float() * 90).to(torch.float8_e4m3fn)

        rewrite(own_model, name, encode)
        with pytest.raises(H3QuantError, match=r"'blocks\.0\.mlp\.fc2\.weight' holds F8_E4M3 codes without"):
            load_pipeline("h3_fp8", model=own_model)

    def test_a_weight_that_is_not_finite(self, load_pipeline: Load, own_model: Path) -> None:
        name = "blocks.2.attn.out_proj.weight"

        def damage(tensors: dict[str, torch.Tensor]) -> None:
            tensors[name][11, 4] = float("nan")

        rewrite(own_model, name, damage)
        with pytest.raises(H3QuantError, match=r"blocks\.2\.attn\.out_proj: the weights of output 11"):
            load_pipeline("h3_int8", model=own_model)
