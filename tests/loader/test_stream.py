"""Tensors under the names of a Diffusers model, which the engine loads without turning them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.loader.formats import engine_layout
from vllm_h3_quant.loader.plan import Plan
from vllm_h3_quant.loader.stream import transformer_stream
from vllm_h3_quant.tiny_h3.formats import stored_values

QKV = "blocks.0.attn.qkv_proj"
TO_Q, TO_K, TO_V = (f"transformer_blocks.0.attn.to_{part}" for part in "qkv")


def streamed(plan: Plan, taken: Collection[str] = ()) -> dict[str, torch.Tensor]:
    assert plan.problems == []

    def nothing(entry: Any) -> None:
        """No progress is shown."""

    return dict(transformer_stream(plan, taken, wanted=engine_layout(own_names=True), arrive=nothing, done=nothing))


@pytest.mark.parametrize("name", ["diffusers_bf16", "modelopt_fp8_tensor", "modelopt_fp8_channel", "modelopt_nvfp4"])
def test_each_part_is_what_it_stands_for(own_folder: Callable[[str], Any], native_h3: Path, name: str) -> None:
    plan = own_folder(name).plan()
    found = streamed(plan)
    values = stored_values(native_h3, name)
    for module, linear in plan.linears.items():
        begin = 0
        for segment in linear.segments if module in values else ():
            part = found[segment.entry.name][segment.file_row : segment.file_row + segment.rows]
            expected = values[module][begin : begin + segment.rows].float().to(torch.bfloat16)
            # NVFP4's two scales round before bf16 does.
            assert torch.allclose(part.float(), expected.float(), rtol=2**-7, atol=0), module
            begin += segment.rows
    assert not {name for name in found if name.endswith(("scale", "scale_2"))}


def test_what_a_method_reads_is_a_stand_in(own_folder: Callable[[str], Any]) -> None:
    found = streamed(own_folder("modelopt_fp8_channel").plan(), {QKV})
    for part in (TO_Q, TO_K, TO_V):
        assert found[f"{part}.weight"].is_meta
    assert not found["transformer_blocks.0.attn.to_out.0.weight"].is_meta


@pytest.mark.parametrize("part", [TO_Q, TO_V])
def test_a_linear_of_codes_and_values(own_folder: Callable[[str], Any], native_h3: Path, part: str) -> None:
    """One part is excluded from quantization, first or last: the others are decoded, not taken for values."""
    folder = own_folder("modelopt_fp8_channel")
    kept = torch.randn(folder.plan().linears[QKV].shape[0] // 3, 192).to(torch.bfloat16)

    def exclude(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(f"{part}.") and not name.endswith("bias")]:
            del tensors[name]
        tensors[f"{part}.weight"] = kept

    folder.change(f"{part}.weight", exclude)
    plan = folder.plan()
    assert QKV in plan.kept
    found = streamed(plan)
    rows = dict(zip((TO_Q, TO_K, TO_V), stored_values(native_h3, "modelopt_fp8_channel")[QKV].chunk(3), strict=True))
    for name, expected in rows.items():
        wanted = kept if name == part else expected.float().to(torch.bfloat16)
        assert torch.equal(found[f"{name}.weight"], wanted), name


def test_other_names_are_refused(own_folder: Callable[[str], Any]) -> None:
    with pytest.raises(H3QuantError, match="the engine expects Diffusers names in this model"):
        streamed(own_folder("comfy_fp8").plan())
