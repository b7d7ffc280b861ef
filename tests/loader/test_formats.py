"""Detection of each format from headers alone, and that its values are those of the native checkpoint, row by row."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vllm_h3_quant.loader import reader
from vllm_h3_quant.loader.checkpoint import open_checkpoint
from vllm_h3_quant.loader.formats import APART, BY_HEAD, IN_THIRDS, Detection, detect
from vllm_h3_quant.loader.formats.comfy import Comfy
from vllm_h3_quant.loader.formats.comfy_fp8 import ComfyFp8
from vllm_h3_quant.loader.formats.comfy_int8 import ComfyInt8
from vllm_h3_quant.loader.formats.diffusers import Diffusers
from vllm_h3_quant.loader.formats.modelopt_fp8 import ModelOptFp8
from vllm_h3_quant.loader.formats.modelopt_nvfp4 import ModelOptNvFp4
from vllm_h3_quant.loader.formats.native import Native
from vllm_h3_quant.loader.plan import plan_transformer
from vllm_h3_quant.tiny_h3.formats import FORMATS, stored_values, write_format

FP32 = torch.float32

EXPECTED = {
    "native": Detection(Native(BY_HEAD)),
    "diffusers_bf16": Detection(Diffusers(APART)),
    "comfy_bf16": Detection(Comfy(IN_THIRDS)),
    "comfy_fp8": Detection(ComfyFp8(IN_THIRDS)),
    "comfy_int8_convrot": Detection(ComfyInt8(IN_THIRDS)),
    "modelopt_fp8_tensor": Detection(ModelOptFp8(APART)),
    "modelopt_fp8_channel": Detection(ModelOptFp8(APART)),
    "modelopt_fp8_native": Detection(ModelOptFp8(BY_HEAD)),
    "modelopt_nvfp4": Detection(ModelOptNvFp4(APART)),
    "fp8_block_native": Detection(ModelOptFp8(BY_HEAD)),
    "pruned_curve": Detection(Comfy(IN_THIRDS), curve=True),
    "pruned_curve_broken": Detection(Comfy(IN_THIRDS), curve=True),
}


def test_table_is_complete() -> None:
    assert set(EXPECTED) == {"native", *FORMATS}


@pytest.mark.parametrize("name", EXPECTED)
def test_detected_from_headers_alone(
    name: str, format_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(file: Path, *stat: int) -> Any:
        raise AssertionError(f"{file} was read")

    folder = format_folder(name)
    monkeypatch.setattr(reader, "_open", read)
    assert detect(open_checkpoint(folder)) == EXPECTED[name]


def test_what_is_no_transformer_is_unknown(tmp_path: Path, native_h3: Path) -> None:
    save_file({"layer.weight": torch.zeros(4, 4)}, tmp_path / "other.safetensors")
    unknown = open_checkpoint(tmp_path)
    assert not detect(unknown).format.known
    assert detect(unknown).name == "unknown"
    encoder = open_checkpoint(native_h3 / "FL2VA" / "text_encoder")
    assert detect(encoder).name == "Qwen3-VL bf16"
    for checkpoint in (unknown, encoder):
        assert "no checkpoint of MiniMax-H3's transformer" in plan_transformer(checkpoint).problems[0]


def tolerance(name: str, values: torch.Tensor) -> float:
    """How far fp32 may be from the exact value.

    One product of a code and a scale is the exact one rounded once. NVFP4 rounds the product of its scales first, each
    time by at most 2^-24. ConvRot rounds each product, and adds 256 of them at most whose magnitudes add up to 16 times
    the row's largest at most (R has entries 1/16): 256 roundings of 2^-24 of that.
    """
    largest = float(values.abs().max())
    return {"modelopt_nvfp4": 2 * 2**-24 * largest, "comfy_int8_convrot": 257 * 2**-24 * 16 * largest}.get(name, 0.0)


@pytest.mark.parametrize("name", FORMATS)
def test_values_follow_the_models_rows(name: str, native_h3: Path, format_folder: Callable[[str], Path]) -> None:
    """Every linear that the writer coded, in the model's order; and the rest as the native file has it."""
    plan = plan_transformer(open_checkpoint(format_folder(name)))
    assert plan.problems == []
    expected = stored_values(native_h3, name)
    assert len(expected) == 2 * 4 + 1 + 2  # two blocks' four linears, an AdaLN, the condition's and the last AdaLN
    for module, values in expected.items():
        linear = plan.linears[module]
        assert linear.shape == tuple(values.shape)
        found = linear.values(0, linear.shape[0], torch.float32)
        limit = tolerance(name, values)
        if limit:
            assert (found.double() - values).abs().max() <= limit, module
        else:
            assert torch.equal(found, values.float()), module


@pytest.mark.parametrize("name", FORMATS)
def test_codes_stand_for_the_native_weights(name: str, native_h3: Path, format_folder: Callable[[str], Path]) -> None:
    """Independent of the writer's own account: relative error of each row below the format's step.

    Half a step of e4m3 is 2^-4 of a value, of e2m1 at most 1/4 (between 1 and 1.5; 0.5 and its neighbours round to
    nothing, which is a sixth of a block's largest); int8 has 1/254 of a row's largest, sqrt(12) less in rms, against
    an rms of about a third. Rows in a wrong order would be off by sqrt(2).
    """
    native = plan_transformer(open_checkpoint(format_folder("native")))
    plan = plan_transformer(open_checkpoint(format_folder(name)))
    limit = 0.25 if "nvfp4" in name else 0.02 if "int8" in name else 2**-4 if plan.detection.quantized else 0.0
    for module, linear in plan.linears.items():
        if plan.detection.curve and "adaln" in module:
            continue  # of another size
        found, want = (each.linears[module].values(0, linear.shape[0], torch.float32) for each in (plan, native))
        error = (found - want).norm(dim=1) / want.norm(dim=1)
        assert error.max() <= limit, module


@pytest.mark.parametrize("name", FORMATS)
def test_other_tensors_are_the_native_ones(name: str, format_folder: Callable[[str], Path]) -> None:
    native = plan_transformer(open_checkpoint(format_folder("native")))
    plan = plan_transformer(open_checkpoint(format_folder(name)))
    gone = {"rope.inv_freq"} if plan.detection.layout == APART else set()
    if plan.detection.curve:
        gone |= {"time_embedder.proj_in.bias", "time_embedder.proj_out.bias"}
    assert native.plain.keys() - plan.plain.keys() == gone
    assert plan.plain.keys() - native.plain.keys() == ({"adaln_t_table"} if plan.detection.curve else set())
    for key in plan.plain.keys() & native.plain.keys():
        assert torch.equal(reader.mapped(plan.plain[key]), reader.mapped(native.plain[key])), key


def test_writer_leaves_everything_else_as_it_is(native_h3: Path, format_root: Callable[[str], Path]) -> None:
    """The engine reads the same root; only a curve changes a size there. The source's own configuration stays."""

    def others(root: Path) -> dict[str, bytes]:
        files = [file for file in root.rglob("*") if file.is_file() and file.parent.name != "transformer"]
        return {str(file.relative_to(root)): file.read_bytes() for file in files if file.name != "tiny_h3.json"}

    def config(root: Path, place: str) -> dict[str, Any]:
        return json.loads((root / place / "config.json").read_text())

    for name in ("modelopt_fp8_channel", "pruned_curve"):
        assert others(format_root(name)) == others(native_h3)
        assert not (format_root(name) / "tiny_h3.json").exists()  # or write_tiny_h3 would take it for its own
    for place in ("transformer", "FL2VA/transformer"):
        assert config(native_h3, place)["time_embed_dim"] == 128
        assert config(format_root("pruned_curve"), place)["time_embed_dim"] == 8
        assert "quantization_config" not in config(native_h3, place)
    assert "quantization_config" not in config(format_root("modelopt_fp8_channel"), "transformer")
    stated = config(format_root("modelopt_fp8_channel"), "FL2VA/transformer")["quantization_config"]
    assert (stated["quant_method"], stated["quant_algo"]) == ("modelopt", "FP8")
    with pytest.raises(FileExistsError):
        write_format(native_h3, format_root("pruned_curve"), "pruned_curve")


@pytest.mark.parametrize(("name", "good"), [("pruned_curve", True), ("pruned_curve_broken", False)])
def test_curve_of_the_writer(name: str, good: bool, native_h3: Path, format_folder: Callable[[str], Path]) -> None:
    """At t = 0 and t = 1 by the time embedder's formula, written out; bf16 weights are good to 2^-8."""
    full = plan_transformer(open_checkpoint(format_folder("native")))
    pruned = plan_transformer(open_checkpoint(format_folder(name)))
    table = reader.mapped(pruned.plain["adaln_t_table"])
    assert (table.shape, table.dtype) == ((1025, 8), torch.float32)
    module = "blocks.0.adaln_proj.linear"
    for row, t in [(0, 0.0), (512, 0.5), (1024, 1.0)]:
        angles = t * torch.tensor([10000.0 ** (-i / 128) for i in range(128)])
        hidden = torch.cat((angles.cos(), angles.sin()))
        for layer in ("proj_in", "proj_out"):
            linear = full.linears[f"time_embedder.{layer}"]
            weight = linear.values(0, linear.shape[0], FP32)
            hidden = torch.nn.functional.silu(
                weight @ hidden + reader.mapped(full.plain[f"time_embedder.{layer}.bias"])
            )
        want = full.linears[module].values(0, 3456, FP32) @ hidden
        got = pruned.linears[module].values(0, 3456, FP32) @ table[row]
        error = float((got - want).norm() / want.norm())
        assert error <= 2**-8 if good else error > 0.5
