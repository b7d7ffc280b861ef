"""What is wrong with a checkpoint: one problem each, which names the file and the tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.loader.architecture import Architecture
from vllm_h3_quant.loader.checkpoint import open_checkpoint
from vllm_h3_quant.loader.coding import Scaled
from vllm_h3_quant.loader.plan import plan_text_encoder, plan_transformer

State = dict[str, torch.Tensor]
Own = Callable[[str], Any]

QKV, FC1, FC2 = "blocks.0.attn.qkv_proj", "blocks.0.mlp.fc1", "blocks.0.mlp.fc2"
COMFY, DIFFUSERS = "model.diffusion_model.", "transformer_blocks.0."
FP32 = torch.float32


@dataclass(frozen=True)
class Edit:
    """A change of one tensor, and the tensor that the problem names."""

    target: str
    change: Callable[[State], None]
    named: str


def put(name: str, value: Any, dtype: torch.dtype = FP32, *, named: str = "") -> Edit:
    tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=dtype)
    return Edit(name, lambda tensors: tensors.update({name: tensor}), named or name)


def drop(name: str, *, named: str) -> Edit:
    def change(tensors: State) -> None:
        del tensors[name]

    return Edit(name, change, named)


def poke(name: str, index: tuple[int, ...], byte: int) -> Edit:
    def change(tensors: State) -> None:
        changed = tensors[name].clone()
        changed.view(torch.uint8)[index] = byte
        tensors[name] = changed

    return Edit(name, change, name)


def marker(name: str, stated: Any) -> Edit:
    text = stated if isinstance(stated, bytes) else json.dumps(stated).encode()
    return put(name, list(text), torch.uint8)


def channel(bad: float) -> torch.Tensor:
    scale = torch.full((192,), 0.01)
    scale[77] = bad
    return scale


INT8_FC2 = f"{COMFY}{FC2}.comfy_quant"
CASES: dict[str, tuple[str, Edit, str]] = {
    # format, edit, what the problem says
    "NaN": ("comfy_fp8", put(f"{COMFY}{FC2}.weight_scale", torch.nan), "holds the scale nan at []"),
    "zero": ("comfy_fp8", put(f"{COMFY}{FC2}.weight_scale", 0.0), "holds the scale 0.0 at []"),
    "negative": ("comfy_fp8", put(f"{COMFY}{FC2}.weight_scale", [-2.0]), "holds the scale -2.0 at [0]"),
    "infinite": ("comfy_fp8", put(f"{COMFY}{FC2}.weight_scale", torch.inf), "holds the scale inf at []"),
    "overflow": ("comfy_fp8", put(f"{COMFY}{FC2}.weight_scale", 1e36), "holds the scale"),
    "a NaN channel": (
        "modelopt_fp8_channel",
        put(f"{DIFFUSERS}ff.net.2.weight_scale", channel(torch.nan)),
        "holds the scale nan at [77]",
    ),
    "a zero channel": (
        "modelopt_fp8_native",
        put(f"{FC2}.weight_scale", channel(0.0)),
        "holds the scale 0.0 at [77]",
    ),
    "scale of integers": ("comfy_fp8", put(f"{COMFY}{FC2}.weight_scale", 1, torch.int32), "is I32, which is no dtype"),
    "scale beside values": ("comfy_bf16", put(f"{COMFY}{FC2}.weight_scale", 2.0), "is a scale beside BF16 values"),
    "second scale beside values": (
        "comfy_bf16",
        put(f"{COMFY}{FC2}.weight_scale_2", 2.0),
        "is a scale beside BF16 values",
    ),
    "scale beside kept values": (
        "modelopt_fp8_native",
        put("blocks.0.adaln_proj.linear.weight_scale", [2.0] * 3456),
        "is a scale beside BF16 values",
    ),
    "scale of a norm": ("native", put("blocks.0.norm1.weight_scale", 2.0), "has no weight beside it"),
    "scale of nothing": ("comfy_fp8", put(f"{COMFY}blocks.0.mlp.fc3.weight_scale", 2.0), "has no weight beside it"),
    "codes without scale": (
        "comfy_fp8",
        drop(f"{COMFY}{FC2}.weight_scale", named=f"{COMFY}{FC2}.weight"),
        "holds F8_E4M3 codes without a weight_scale",
    ),
    "scales of too few rows": (
        "modelopt_fp8_native",
        put(f"{FC2}.weight_scale", [1.0] * 191),
        "has the shape [191], which is no scale of a weight [192, 128]",
    ),
    "scales of too many rows": ("modelopt_fp8_native", put(f"{FC2}.weight_scale", [1.0] * 193), "has the shape [193]"),
    "scales of no rows": ("modelopt_fp8_native", put(f"{FC2}.weight_scale", []), "has the shape [0]"),
    "scales of no columns": (
        "modelopt_fp8_native",
        put(f"{FC2}.weight_scale", torch.empty(2, 0)),
        "has the shape [2, 0]",
    ),
    "scales in three dimensions": (
        "modelopt_fp8_native",
        put(f"{FC2}.weight_scale", torch.ones(2, 2, 2)),
        "has the shape [2, 2, 2]",
    ),
    "block over heads": (
        "fp8_block_native",
        put(f"{QKV}.weight_scale", torch.ones(3, 2), named=f"{QKV}.weight"),
        "has one scale for 256 rows, which straddles heads of 128",
    ),
    "block of three quarters of a head": (
        "fp8_block_native",
        put(f"{QKV}.weight_scale", torch.ones(8, 2), named=f"{QKV}.weight"),
        "has one scale for 96 rows, which straddles heads of 128",
    ),
    "wrong shape": (
        "native",
        put(f"{FC2}.weight", torch.zeros(192, 64, dtype=torch.bfloat16)),
        "makes blocks.0.mlp.fc2.weight [192, 64], the model has [192, 128]",
    ),
    "one dimension": (
        "native",
        put(f"{FC2}.weight", torch.zeros(192, dtype=torch.bfloat16)),
        "has the shape [192], not rows and columns",
    ),
    "wrong shape of codes": (
        "modelopt_nvfp4",
        put(
            f"{DIFFUSERS}ff.net.2.weight",
            torch.zeros(192, 32, dtype=torch.uint8),
            named=f"{DIFFUSERS}ff.net.2.weight_scale",
        ),
        "NVFP4 codes [192, 32] take F8_E4M3 [192, 4]",
    ),
    "k of another width": (
        "diffusers_bf16",
        put(
            f"{DIFFUSERS}attn.to_k.weight",
            torch.zeros(256, 96, dtype=torch.bfloat16),
            named=f"{DIFFUSERS}attn.to_q.weight",
        ),
        "make no blocks.0.attn.qkv_proj.weight: q [256, 192], k [256, 96], v [256, 192]",
    ),
    "integers": (
        "native",
        put(f"{FC2}.weight", torch.zeros(192, 128, dtype=torch.int16)),
        "is I16, which no linear of this model holds",
    ),
    "norm of another size": (
        "native",
        put("blocks.0.norm1.weight", torch.ones(96, dtype=torch.bfloat16)),
        "has the shape [96], the model's blocks.0.norm1.weight has [192]",
    ),
    "norm of integers": (
        "native",
        put("blocks.0.norm1.weight", torch.ones(192, dtype=torch.int32)),
        "is I32, but blocks.0.norm1.weight takes values",
    ),
    "unexpected": (
        "native",
        put("blocks.0.norm1.weigth", torch.ones(3)),
        "is no tensor of this model; nearest is 'blocks.0.norm1.weight'",
    ),
    "marker of another format": (
        "comfy_int8_convrot",
        marker(INT8_FC2, {"format": "float8_e4m3fn"}),
        "states the format 'float8_e4m3fn', but the weight is int8_tensorwise",
    ),
    "marker that is no JSON": ("comfy_int8_convrot", marker(INT8_FC2, b"\xff\n{"), "is no JSON"),
    "marker of a list": ("comfy_int8_convrot", marker(INT8_FC2, ["\n"]), "holds ['\\n'], not a mapping"),
    "empty marker": ("comfy_int8_convrot", marker(INT8_FC2, b""), "is no JSON"),
    "group of the marker": (
        "comfy_int8_convrot",
        marker(INT8_FC2, {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256}),
        "states convrot_groupsize=256; expected a power of 4 up to 1024 that divides 128 columns",
    ),
    "global scale beside FP8": ("comfy_fp8", put(f"{COMFY}{FC2}.weight_scale_2", 2.0), "belongs to NVFP4"),
    "NaN in NVFP4": (
        "modelopt_nvfp4",
        poke(f"{DIFFUSERS}ff.net.2.weight_scale", (5, 1), 0x7F),
        "holds the scale nan at [5, 1]",
    ),
    "negative in NVFP4": (
        "modelopt_nvfp4",
        poke(f"{DIFFUSERS}ff.net.2.weight_scale", (5, 1), 0xB8),
        "holds the scale -1.0 at [5, 1]",
    ),
    "NVFP4 without its global scale": (
        "modelopt_nvfp4",
        drop(f"{DIFFUSERS}ff.net.2.weight_scale_2", named=f"{DIFFUSERS}ff.net.2.weight"),
        "holds NVFP4 codes without one weight_scale_2",
    ),
    "NVFP4 with a zero global scale": (
        "modelopt_nvfp4",
        put(f"{DIFFUSERS}ff.net.2.weight_scale_2", 0.0),
        "holds the scale 0.0",
    ),
    "NVFP4 with scales of rows": (
        "modelopt_nvfp4",
        put(f"{DIFFUSERS}ff.net.2.weight_scale", torch.ones(192)),
        "is F32 [192]; NVFP4 codes [192, 64] take F8_E4M3 [192, 8]",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_one_problem_that_names_file_and_tensor(case: str, own_folder: Own) -> None:
    name, edit, told = CASES[case]
    folder = own_folder(name)
    assert folder.plan().problems == []
    folder.change(edit.target, edit.change)
    plan = folder.plan()
    (problem,) = plan.problems
    assert problem.startswith(f"{folder.file_of(edit.named)}: tensor {edit.named!r} "), problem
    assert told in problem
    assert "\n" not in problem
    with pytest.raises(H3QuantError) as caught:
        plan.check()
    assert str(caught.value) == problem


@pytest.mark.parametrize(
    ("name", "tensor"),
    [("native", "blocks.0.norm2.weight"), ("comfy_fp8", f"{COMFY}final_layer.adaln_proj.linear.bias")],
)
def test_missing_tensor(name: str, tensor: str, own_folder: Own) -> None:
    folder = own_folder(name)
    folder.change(tensor, lambda tensors: tensors.pop(tensor))
    (problem,) = folder.plan().problems
    assert problem == f"{folder.path}: lacks {tensor.removeprefix(COMFY)!r}"


def test_missing_q(own_folder: Own) -> None:
    folder = own_folder("diffusers_bf16")
    tensor = f"{DIFFUSERS}attn.to_q.weight"
    folder.change(tensor, lambda tensors: tensors.pop(tensor))
    (problem,) = folder.plan().problems
    assert problem == f"{folder.path}: blocks.0.attn.qkv_proj has only k, v of q, k, v; copy all of it"


def test_missing_linear_and_its_scales(own_folder: Own) -> None:
    """The weight is lacking and its two companions would be consumed by nothing."""
    folder = own_folder("modelopt_fp8_native")
    folder.change(f"{FC2}.weight", lambda tensors: tensors.pop(f"{FC2}.weight"))
    problems = folder.plan().problems
    assert len(problems) == 3
    assert sum("lacks" in problem for problem in problems) == 1
    assert sum("has no weight beside it: nothing would consume it" in problem for problem in problems) == 2


def test_rope_may_be_left_out_and_a_marker_of_old_files_is_none_of_the_tensors(own_folder: Own) -> None:
    folder = own_folder("comfy_fp8")
    rope = f"{COMFY}rope.inv_freq"
    folder.change(rope, lambda tensors: tensors.pop(rope))
    folder.set(f"{COMFY}scaled_fp8", torch.zeros(2, dtype=torch.float8_e4m3fn))
    assert folder.plan().problems == []


def test_more_problems_are_counted(own_folder: Own) -> None:
    folder = own_folder("comfy_fp8")
    for module in (FC1, FC2):
        folder.set(f"{COMFY}{module}.weight_scale", torch.tensor(0.0))
    plan = folder.plan()
    assert len(plan.problems) == 2
    with pytest.raises(H3QuantError, match=r"\(and 1 more; vllm-h3-quant check .* lists them\)$"):
        plan.check()


def test_fp32_that_was_rounded_is_told(own_folder: Own) -> None:
    """It loads as what it was rounded to."""
    folder = own_folder("diffusers_bf16")
    assert folder.plan().notes == []
    folder.set("proj_out.bias", torch.zeros(96, dtype=torch.bfloat16))
    folder.set("proj_out.weight", torch.zeros(96, 192, dtype=torch.float16))
    plan = folder.plan()
    assert plan.problems == []
    (note,) = plan.notes
    assert "2 of the tensors that the model keeps in fp32 are stored in BF16, F16" in note
    assert "such as 'final_layer.video_out.bias'" in note


def test_a_scale_of_one_beside_values_changes_nothing(own_folder: Own) -> None:
    folder = own_folder("comfy_bf16")
    folder.set(f"{COMFY}{FC2}.weight_scale", torch.ones(192))
    assert folder.plan().problems == []


def test_kept_is_the_checkpoints_own_list_of_exclusions(format_folder: Callable[[str], Path]) -> None:
    def kept(name: str) -> frozenset[str]:
        return plan_transformer(open_checkpoint(format_folder(name))).kept

    fp32 = {
        "video_patch_proj",
        "audio_patch_proj",
        "time_embedder.proj_in",
        "time_embedder.proj_out",
        "final_layer.video_out",
        "final_layer.audio_out",
    }
    refiner = {f"token_refiner.blocks.0.{name}" for name in ("attn.qkv_proj", "attn.out_proj", "mlp.fc1", "mlp.fc2")}
    adaln = {"blocks.0.adaln_proj.linear", "final_layer.adaln_proj.linear"}
    assert kept("comfy_fp8") == fp32
    assert kept("modelopt_fp8_native") == fp32 | refiner | adaln
    assert kept("diffusers_bf16") == frozenset()


@pytest.mark.parametrize(
    ("shape", "row_block", "column_block"),
    [
        ((), 768, 192),
        ((1, 1), 768, 192),
        ((768,), 1, 192),
        ((768, 1), 1, 192),
        ((6, 2), 128, 128),  # the second block of columns is cut off
        ((12, 3), 64, 64),
        ((1, 192), 768, 1),
    ],
)
def test_blocks_follow_from_the_shape_of_the_scale(
    shape: tuple[int, ...], row_block: int, column_block: int, own_folder: Own
) -> None:
    """And each row of the model takes the scale of its row in the file, heads apart."""
    folder = own_folder("fp8_block_native")
    scale = torch.rand(shape) + 0.5
    folder.set(f"{QKV}.weight_scale", scale)
    plan = folder.plan()
    assert plan.problems == []
    linear = plan.linears[QKV]
    (coding,) = {segment.coding for segment in linear.segments}
    assert isinstance(coding, Scaled)
    assert (coding.row_block, coding.column_block) == (row_block, column_block)
    codes = linear.codes(0, 768).float()
    grid = scale.reshape(-1, 1) if len(shape) < 2 else scale
    spread = grid.repeat_interleave(row_block, 0).repeat_interleave(column_block, 1)[:, :192]
    in_model_order = spread.view(2, 3, 128, 192).transpose(0, 1).reshape(768, 192)
    assert torch.equal(linear.values(0, 768, FP32), codes * in_model_order)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_layers", 0),
        ("num_layers", [3]),
        ("num_layers", 10**9),
        ("num_layers", True),
        ("hidden_size", -192),
        ("hidden_size", "192"),
        ("ffn_dim", 2**31),
        ("patch_size", [1, 2]),
        ("patch_size", 2),
        ("rope_theta", None),
    ],
)
def test_sizes_that_are_none(key: str, value: Any) -> None:
    with pytest.raises(H3QuantError, match=r"^config\.json: \w+=.* is not valid; MiniMax-H3 has "):
        Architecture.from_config({key: value}, where="config.json")


def test_sizes_of_the_release() -> None:
    """A configuration that states none is MiniMax-H3's."""
    full = Architecture.from_config({"_class_name": "MiniMaxH3Transformer3DModel"}, where="config.json")
    tensors = full.tensors()
    assert tensors["blocks.49.attn.qkv_proj.weight"].shape == (21504, 5376)
    assert tensors["blocks.0.adaln_proj.linear.weight"].shape == (96768, 2688)
    assert sum("mlp.fc1" in name for name in tensors) == 52


def encoder(tmp_path: Path, **weights: torch.Tensor) -> Any:
    prefix = "model.language_model.layers.0."
    save_file(
        {prefix + name.replace("__", ".") + ".weight": w for name, w in weights.items()}, tmp_path / "m.safetensors"
    )
    return plan_text_encoder(open_checkpoint(tmp_path), 1)


def rows(count: int, columns: int = 8) -> torch.Tensor:
    return torch.arange(count * columns).reshape(count, columns).bfloat16()


def test_text_encoder_parts_in_order(tmp_path: Path) -> None:
    plan = encoder(tmp_path, self_attn__v_proj=rows(2), self_attn__q_proj=rows(4) + 1, self_attn__k_proj=rows(2) + 2)
    assert plan.problems == []
    linear = plan.linears["text_model.layers.0.self_attn.qkv_proj"]
    assert linear.parts == {"q": (0, 4), "k": (4, 2), "v": (6, 2)}
    assert torch.equal(linear.values(0, 8, torch.bfloat16), torch.cat((rows(4) + 1, rows(2) + 2, rows(2))))


def test_text_encoder_whole_and_in_parts(tmp_path: Path) -> None:
    (problem,) = encoder(tmp_path, self_attn__qkv_proj=rows(8), self_attn__q_proj=rows(4)).problems
    assert "text_model.layers.0.self_attn.qkv_proj is there whole and in parts" in problem


def test_text_encoder_parts_of_other_widths(tmp_path: Path) -> None:
    (problem,) = encoder(tmp_path, mlp__gate_proj=rows(4), mlp__up_proj=rows(4, 6)).problems
    assert "make no text_model.layers.0.mlp.gate_up_proj.weight: gate [4, 8], up [4, 6]" in problem


def test_text_encoder_bias(tmp_path: Path) -> None:
    """The model has none there, so that it would be left out without a word, with a weight beside it or not."""
    name = "model.language_model.layers.0.mlp.down_proj"
    save_file({f"{name}.weight": rows(4), f"{name}.bias": rows(4)[:, 0].clone()}, tmp_path / "m.safetensors")
    (problem,) = plan_text_encoder(open_checkpoint(tmp_path), 1).problems
    assert problem.endswith(f"tensor '{name}.bias' is a bias of a linear that has none here")


def test_an_exports_codes_have_nothing_else_beside_them(tmp_path: Path) -> None:
    """Its metadata says how they were made; a marker of another writer says something else of them."""
    name = "model.language_model.layers.0.mlp.down_proj"
    stated = json.dumps({"format": "float8_e4m3fn", "convrot": True, "convrot_groupsize": 4}).encode()
    tensors = {
        f"{name}.weight": rows(4).to(torch.float8_e4m3fn),
        f"{name}.weight_scale": torch.ones(4, 1),
        f"{name}.comfy_quant": torch.tensor(list(stated), dtype=torch.uint8),
    }
    made = {"format": "vllm-h3-quant", f"linear.{name}": json.dumps({"format": "fp8", "rotation": 0})}
    save_file(tensors, tmp_path / "m.safetensors", metadata=made)
    (problem,) = plan_text_encoder(open_checkpoint(tmp_path), 1).problems
    assert f"tensor '{name}.comfy_quant' belongs to no export" in problem


def test_text_encoder_reads_only_the_layers_in_use(native_h3: Path) -> None:
    folder = native_h3 / "FL2VA" / "text_encoder"
    assert len(plan_text_encoder(open_checkpoint(folder), 1).linears) == 4
    assert plan_text_encoder(open_checkpoint(folder), 0).linears == {}


def test_a_transformer_is_no_text_encoder(format_folder: Callable[[str], Path]) -> None:
    (problem,) = plan_text_encoder(open_checkpoint(format_folder("native")), 1).problems
    assert "no checkpoint of the text encoder" in problem


def test_names_with_absurd_numbers(tmp_path: Path) -> None:
    """Python refuses to read a number of more than 4300 digits."""
    save_file({f"model.language_model.layers.{'9' * 5000}.mlp.up_proj.weight": rows(2)}, tmp_path / "m.safetensors")
    assert plan_text_encoder(open_checkpoint(tmp_path), 1).problems
    assert plan_transformer(open_checkpoint(tmp_path)).problems
