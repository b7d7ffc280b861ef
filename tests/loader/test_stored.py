"""Parts of a stored linear: any rows, into any dtype, as codes or as values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from vllm_h3_quant.kernels.formats import FP8, INT8
from vllm_h3_quant.loader import stored
from vllm_h3_quant.loader.checkpoint import open_checkpoint
from vllm_h3_quant.loader.plan import Plan, plan_transformer
from vllm_h3_quant.tiny_h3.formats import FORMATS

QKV, FC1, FC2 = "blocks.0.attn.qkv_proj", "blocks.0.mlp.fc1", "blocks.0.mlp.fc2"
RANGES = [(0, 1), (127, 2), (100, 300), (255, 1), (383, 130), (767, 1), (0, 768)]
"""Of 768 rows of qkv_proj: within a head, over heads, over parts, all."""


@pytest.fixture
def plan_of(format_folder: Callable[[str], Path]) -> Callable[[str], Plan]:
    return lambda name: plan_transformer(open_checkpoint(format_folder(name)))


@pytest.mark.parametrize("name", ["native", *FORMATS])
def test_rows_of_a_range_are_those_of_the_whole(name: str, plan_of: Callable[[str], Plan]) -> None:
    """ConvRot's product is a matrix product, whose fp32 sums may differ with the number of rows."""
    linear = plan_of(name).linears[QKV]
    whole = linear.values(0, 768, torch.float32)
    for first, count in RANGES:
        part = torch.full((count, linear.shape[1]), torch.nan)
        linear.fill(part, first)
        limit = 256 * 2**-24 * 16 * float(whole.abs().max()) if "convrot" in name else 0.0
        assert (part - whole[first : first + count]).abs().max() <= limit, (first, count)


@pytest.mark.parametrize("name", ["modelopt_fp8_channel", "modelopt_fp8_native", "comfy_fp8"])
def test_codes_and_row_scales_are_the_values(name: str, plan_of: Callable[[str], Plan]) -> None:
    """Scales follow their rows through every order: code times scale is the value, exactly."""
    for module in (QKV, FC1, FC2):
        linear = plan_of(name).linears[module]
        rows = linear.shape[0]
        assert linear.has_codes(FP8)
        assert not linear.has_codes(INT8)
        for first, count in [(0, rows), (rows // 3 - 1, rows // 2)]:
            codes, scale = linear.codes(first, count), linear.row_scale(first, count)
            assert (codes.dtype, scale.shape) == (torch.float8_e4m3fn, (count, 1))
            assert torch.equal(codes.float() * scale, linear.values(first, count, torch.float32))
            target = torch.empty(count, linear.shape[1], dtype=torch.float8_e4m3fn)
            linear.fill(target, first)
            assert torch.equal(target.view(torch.uint8), codes.view(torch.uint8))


@pytest.mark.parametrize(
    ("name", "fp8", "int8"),
    [
        ("native", False, False),
        ("comfy_int8_convrot", False, False),  # rotated by another matrix than ours
        ("modelopt_nvfp4", False, False),
        ("fp8_block_native", False, False),
        ("modelopt_fp8_tensor", True, False),
    ],
)
def test_which_codes_can_be_used(name: str, fp8: bool, int8: bool, plan_of: Callable[[str], Plan]) -> None:
    linear = plan_of(name).linears[QKV]
    assert (linear.has_codes(FP8), linear.has_codes(INT8)) == (fp8, int8)


def test_whole_is_mapped_where_the_file_has_the_models_order(plan_of: Callable[[str], Plan]) -> None:
    for name, whole in [("comfy_bf16", True), ("native", False), ("diffusers_bf16", False)]:
        linear = plan_of(name).linears[QKV]
        found = linear.whole()
        assert (found is not None) is whole, name
        if found is not None:
            assert torch.equal(found, linear.values(0, 768, torch.bfloat16))
    assert plan_of("native").linears[FC1].whole() is not None
    assert plan_of("diffusers_bf16").linears[FC1].whole() is None


@pytest.mark.parametrize("name", ["native", "modelopt_fp8_channel", "modelopt_nvfp4"])
def test_pieces_of_any_size_fill_the_same(
    name: str, plan_of: Callable[[str], Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor above the size of a piece is read in several; here every five rows or fewer."""
    linear = plan_of(name).linears[QKV]
    whole = linear.values(0, 768, torch.float32)
    monkeypatch.setattr(stored, "CHUNK", 5 * linear.segments[0].entry.row_nbytes)
    again = torch.full(linear.shape, torch.nan)
    linear.fill(again, 0)
    assert torch.equal(again, whole)


def test_values_in_bf16_are_the_native_ones_and_codes_are_rounded(plan_of: Callable[[str], Plan]) -> None:
    assert torch.equal(
        plan_of("native").linears[QKV].values(3, 500, torch.bfloat16),
        plan_of("diffusers_bf16").linears[QKV].values(3, 500, torch.bfloat16),
    )
    linear = plan_of("modelopt_fp8_channel").linears[QKV]
    exact = linear.values(3, 500, torch.float32)
    assert torch.equal(linear.values(3, 500, torch.bfloat16), exact.bfloat16())


def test_parts_and_bytes(plan_of: Callable[[str], Plan]) -> None:
    linear = plan_of("diffusers_bf16").linears[QKV]
    assert linear.parts == {"q": (0, 256), "k": (256, 256), "v": (512, 256)}
    assert linear.nbytes == 768 * 192 * 2
    assert [entry.name.rpartition(".")[0][-4:] for entry in linear.entries] == ["to_q", "to_k", "to_v"]
    native = plan_of("native").linears[QKV]
    assert native.parts == {"": (0, 768)}
    assert native.nbytes == 768 * 192 * 2
    assert len(native.entries) == 1
