"""Checkpoints of every format through the engine's loader: which numbers a linear ends up with, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

from vllm_h3_quant.engine import report
from vllm_h3_quant.engine.survey import survey
from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.export.config import parse_request
from vllm_h3_quant.export.run import export
from vllm_h3_quant.kernels.quantize import quantize_rows_reference
from vllm_h3_quant.loader import intake
from vllm_h3_quant.loader import stored as stored_module
from vllm_h3_quant.loader.architecture import Architecture
from vllm_h3_quant.loader.decided import ON_THE_CURVE, STORED_AS_VALUES
from vllm_h3_quant.loader.header import read_header
from vllm_h3_quant.loader.inspect import ENCODER_LAYERS
from vllm_h3_quant.loader.reader import mapped
from vllm_h3_quant.tiny_h3.formats import stored_values, write_format
from vllm_h3_quant.upstream import weight_source

Load = Callable[..., Any]
FP8, INT8 = "h3_fp8", "h3_int8"

QUANTIZED = 25
"""Linears of the tiny DiT that a method quantizes."""


@pytest.fixture(scope="module")
def roots(tiny_h3: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("formats")

    def root(name: str) -> Path:
        target = folder / name
        return target if target.exists() else write_format(tiny_h3, target, name)

    return root


def linears(pipeline: Any) -> dict[str, Any]:
    return {name: module for name, module in pipeline.transformer.named_modules() if isinstance(module, LinearBase)}


def numbers(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """``(N, K)`` codes and ``(N, 1)`` scales."""
    return layer.weight.data.t(), layer.weight_scale.data.t()


@pytest.mark.parametrize(
    ("name", "method", "as_they_are", "kept"),
    [
        ("diffusers_bf16", INT8, 0, 0),
        ("comfy_bf16", FP8, 0, 0),
        ("comfy_fp8", FP8, 25, 0),
        ("comfy_fp8", INT8, 0, 0),
        ("comfy_int8_convrot", INT8, 0, 0),
        ("modelopt_fp8_tensor", FP8, 25, 0),
        ("modelopt_fp8_channel", FP8, 25, 0),
        ("modelopt_fp8_native", FP8, 13, 12),
        ("modelopt_nvfp4", FP8, 0, 0),
        # Codes can stay where a row is one block wide, and where 128 does not divide the rows, which have a scale each.
        ("fp8_block_native", FP8, 15, 0),
    ],
)
def test_every_weight_is_what_the_file_stands_for(
    load_pipeline: Load,
    roots: Callable[[str], Path],
    tiny_h3: Path,
    name: str,
    method: str,
    as_they_are: int,
    kept: int,
) -> None:
    pipeline = load_pipeline(method, model=roots(name))
    values = stored_values(tiny_h3, name)
    found = {"codes": 0, "kept": 0, "quantized": 0}
    for linear, layer in linears(pipeline).items():
        if linear not in values:
            continue
        if isinstance(layer.quant_method, UnquantizedLinearMethod):
            found["kept"] += 1
            assert torch.equal(layer.weight.data, values[linear].to(torch.bfloat16)), linear
            continue
        codes, scale = numbers(layer)
        if layer.quant_method.arrival.has_codes:
            found["codes"] += 1
            assert torch.equal(codes.double() * scale.double(), values[linear]), linear
            continue
        found["quantized"] += 1
        whole = values[linear].float().to(torch.bfloat16)
        wanted, wanted_scale = quantize_rows_reference(
            whole, layer.quant_method.fmt, rotation=layer.quant_method.rotation
        )
        # Sums of ConvRot's inverse and NVFP4's two scales round before bf16 does, so a number may be the next bf16
        # and its code the next code; a row's largest number then moves its scale by up to 2**-7.
        assert torch.allclose(scale, wanted_scale, rtol=2**-7), linear
        assert (codes.view(torch.uint8) != wanted.view(torch.uint8)).float().mean() < 0.02, linear
    assert found["codes"] == as_they_are
    assert found["kept"] == kept
    assert sum(found.values()) == QUANTIZED


def test_a_layer_that_is_ignored_gets_decoded_values(
    load_pipeline: Load, roots: Callable[[str], Path], tiny_h3: Path
) -> None:
    """Grouped and swapped back on the way, because the engine reorders what is not ours."""
    ignored = ["blocks.0", "token_refiner.blocks.1"]
    values = stored_values(tiny_h3, "modelopt_fp8_channel")
    pipeline = load_pipeline({"method": FP8, "ignored_layers": ignored}, model=roots("modelopt_fp8_channel"))
    for linear, layer in linears(pipeline).items():
        if linear in values and linear.startswith(tuple(ignored)):
            assert torch.equal(layer.weight.data, values[linear].float().to(torch.bfloat16)), linear


def test_rope_frequencies_that_a_file_leaves_out(load_pipeline: Load, roots: Callable[[str], Path]) -> None:
    ours = load_pipeline(FP8, model=roots("diffusers_bf16")).transformer.rope.inv_freq
    assert torch.equal(ours, load_pipeline(FP8).transformer.rope.inv_freq)


class TestCurve:
    def test_is_refused_unless_allowed(self, load_pipeline: Load, roots: Callable[[str], Path]) -> None:
        with pytest.raises(H3QuantError, match=r"cosine.*allow_unverified_curve"):
            load_pipeline(FP8, model=roots("pruned_curve"))

    def test_serves_from_its_table(self, load_pipeline: Load, roots: Callable[[str], Path]) -> None:
        root = roots("pruned_curve")
        pipeline = load_pipeline({"method": FP8, "allow_unverified_curve": True}, model=root)
        table = next(iter((root / "FL2VA" / "transformer").glob("*.safetensors")))
        stored = load_file(table)["model.diffusion_model.adaln_t_table"]
        assert torch.equal(pipeline.transformer.time_embedder.table, stored)
        at = torch.tensor([0.0, 0.5, 1.0])
        assert torch.equal(pipeline.transformer.time_embedder(at), stored[[0, 512, 1024]])
        adaln = pipeline.transformer.blocks[0].adaln_proj.linear
        assert isinstance(adaln.quant_method, UnquantizedLinearMethod)
        part = survey(pipeline, None).components["transformer"]
        assert part.kept[ON_THE_CURVE] == 4
        assert part.quantized == QUANTIZED - 4

    def test_width_is_that_of_the_engine(self, load_pipeline: Load, tiny_h3: Path, tmp_path: Path) -> None:
        root = write_format(tiny_h3, tmp_path / "h3", "pruned_curve")
        config = root / "transformer" / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"time_embed_dim": 128}))
        with pytest.raises(H3QuantError, match="time_embed_dim"):
            load_pipeline({"method": FP8, "allow_unverified_curve": True}, model=root)


def test_a_scale_that_is_nan_stops_the_start_before_a_weight_is_read(
    load_pipeline: Load, tiny_h3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_omni.diffusion.model_loader.diffusers_loader import DiffusersPipelineLoader

    root = write_format(tiny_h3, tmp_path / "h3", "modelopt_fp8_channel")
    name = "transformer_blocks.1.attn.to_k.weight_scale"
    for file in (root / "FL2VA" / "transformer").glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            tensors[name][5] = float("nan")
            save_file(tensors, str(file))
    monkeypatch.setattr(DiffusersPipelineLoader, "get_all_weights", lambda *a, **k: pytest.fail("weights were read"))
    with pytest.raises(H3QuantError, match=rf"safetensors: tensor '{name}' holds the scale nan at \[5\]"):
        load_pipeline(FP8, model=root)


def test_the_report_says_what_was_loaded(
    load_pipeline: Load, roots: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(report.REPORT_VARIABLE, str(tmp_path / "report.json"))
    load_pipeline(FP8, model=roots("modelopt_fp8_native"))
    written = report.LoadReport.model_validate_json((tmp_path / "report.json").read_text())
    assert written.components["transformer"].checkpoint == (
        "transformer: ModelOpt FP8, 0.01 GiB: codes of 13 linears are used as they are, 0 are decoded and quantized"
        " again, 12 linears are values and stay so"
    )
    assert written.components["transformer"].quantized == 13
    assert written.components["transformer"].kept[STORED_AS_VALUES] == 12


def test_a_load_tells_what_a_plan_notes(
    load_pipeline: Load, roots: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    planned = intake.plan_transformer

    def noted(*arguments: Any) -> Any:
        plan = planned(*arguments)
        plan.notes.append("bits were lost")
        return plan

    monkeypatch.setattr(intake, "plan_transformer", noted)
    monkeypatch.setattr(intake.logger, "warning", lambda text, *values: said.append(text % values))
    load_pipeline(FP8, model=roots("diffusers_bf16"))
    assert said == ["bits were lost"]


def test_codes_merge_no_adapter_while_they_are_read(
    load_pipeline: Load, roots: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:

    monkeypatch.setattr(weight_source, "fuses_adapter", lambda pipeline: True)
    with pytest.raises(H3QuantError, match="an adapter is merged into the weights as they are read"):
        load_pipeline(FP8, model=roots("comfy_fp8"))


def test_a_stand_in_without_a_source() -> None:
    """Should the engine hand out a tensor on the meta device by itself, no weight must pass for loaded."""
    from types import SimpleNamespace

    from vllm_h3_quant.methods.arrival import Arrival

    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.empty(4, 4, device="meta"), requires_grad=False)
    layer.weight.weight_loader = lambda *a: None
    layer.logical_widths, layer.quant_method = [4], SimpleNamespace()
    arrival = Arrival(layer, "blocks.0.mlp.fc2", on_tensor=lambda *a: None, on_complete=lambda *a: None)
    arrival.watch("weight")
    with pytest.raises(H3QuantError, match=r"blocks\.0\.mlp\.fc2\.weight has nothing but a stand-in"):
        layer.weight.weight_loader(layer.weight, torch.empty(4, 4, device="meta"))


class TestExport:
    @pytest.fixture(scope="class")
    @classmethod
    def root(cls, tiny_h3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("export") / "h3"
        export(tiny_h3, folder, parse_request(INT8, where="test"))
        return folder

    def test_parameters_are_those_of_online_quantization(self, load_pipeline: Load, root: Path) -> None:
        online, stored = load_pipeline(INT8), load_pipeline(None, model=root)
        named = dict(stored.named_parameters())
        for name, parameter in online.named_parameters():
            found = named.pop(name)
            assert found.dtype is parameter.dtype, name
            assert found.stride() == parameter.stride(), name
            assert torch.equal(found.view(torch.uint8), parameter.view(torch.uint8)), name
        assert not named

    def test_weights_stay_mapped_on_the_host(self, load_pipeline: Load, root: Path) -> None:
        """Views of the file, not copies: ranks of a host share them."""
        seen = {}

        def observed(entry: Any) -> torch.Tensor:
            tensor = mapped(entry)
            seen[entry.name] = tensor.data_ptr()
            return tensor

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stored_module, "mapped", observed)
            pipeline = load_pipeline(None, model=root)
        for name, layer in linears(pipeline).items():
            if layer.weight.dtype is torch.int8:
                assert layer.weight.data_ptr() == seen[f"{name}.weight"], name
                assert layer.weight.data_ptr() % 128 == 0, name

    def test_counts_as_quantized_offline(self, load_pipeline: Load, root: Path) -> None:
        from vllm_omni.diffusion.model_loader.host_weight_plan import has_online_quantization

        assert not has_online_quantization(load_pipeline(None, model=root))
        assert has_online_quantization(load_pipeline(INT8))

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            (FP8, "was exported with method='h3_int8', not 'h3_fp8'"),
            ({"method": INT8, "adaln": "keep"}, "was exported with adaln='quantize', not 'keep'"),
            ({"method": INT8, "rotation": 128}, "was exported with rotation=256, not 128"),
        ],
    )
    def test_what_it_fixes_cannot_be_chosen(self, load_pipeline: Load, root: Path, config: Any, message: str) -> None:
        with pytest.raises(H3QuantError, match=message):
            load_pipeline(config, model=root)

    def test_a_configuration_that_is_not_true(self, load_pipeline: Load) -> None:
        with pytest.raises(H3QuantError, match=r"config\.json says that this is an export"):
            load_pipeline({"method": INT8, "checkpoint": "vllm-h3-quant"})

    def test_a_flipped_bit_is_found_when_asked_for(self, load_pipeline: Load, root: Path, tmp_path: Path) -> None:
        damaged = tmp_path / "h3"
        shutil.copytree(root, damaged)
        load_pipeline({"method": INT8, "verify": True}, model=damaged)
        file = sorted((damaged / "FL2VA" / "transformer").glob("*.safetensors"))[1]
        entry = next(entry for entry in read_header(file).entries.values() if entry.dtype == "I8")
        with file.open("r+b") as stream:
            stream.seek(entry.start + 100)
            byte = stream.read(1)[0]
            stream.seek(-1, 1)
            stream.write(bytes([byte ^ 64]))
        with pytest.raises(H3QuantError, match=rf"{file.name}: the bytes of tensor '{entry.name}'"):
            load_pipeline({"method": INT8, "verify": True}, model=damaged)


def test_sizes_are_those_of_the_engine() -> None:
    """``check`` and ``export`` know them without importing it."""
    from vllm_omni.diffusion.models.minimax_h3.minimax_h3_transformer import MiniMaxH3DiTArchConfig

    theirs = vars(MiniMaxH3DiTArchConfig())
    for name, value in vars(Architecture()).items():
        if name != "rope_theta":  # the engine keeps it beside them
            assert theirs[name] == value, name
    assert weight_source.encoder_layers() == ENCODER_LAYERS
