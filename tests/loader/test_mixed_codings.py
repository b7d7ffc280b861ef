"""A linear whose parts are coded in several ways: what is said of it, and which numbers it has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vllm_h3_quant.kernels.formats import FP8, INT8
from vllm_h3_quant.loader.checkpoint import open_checkpoint
from vllm_h3_quant.loader.coding import Coding, Scaled, Values
from vllm_h3_quant.loader.header import read_header
from vllm_h3_quant.loader.inspect import codings
from vllm_h3_quant.loader.plan import Plan, plan_text_encoder
from vllm_h3_quant.loader.stored import Segment, StoredLinear
from vllm_h3_quant.loader.stream import encoder_stream

QKV = "blocks.0.attn.qkv_proj"
PARTS = tuple(f"transformer_blocks.0.attn.to_{part}" for part in "qkv")
STREAMED = "model.language_model.layers.0.self_attn"
FP32 = torch.float32


@pytest.fixture
def mixed(own_folder: Callable[[str], Any]) -> Callable[..., tuple[Plan, torch.Tensor]]:
    """``mixed(q, k, v)``: a plan whose parts have these tensors by last name, or stay; and the values of the rest."""

    def make(*parts: dict[str, torch.Tensor] | None) -> tuple[Plan, torch.Tensor]:
        folder = own_folder("modelopt_fp8_channel")
        linear = folder.plan().linears[QKV]
        before = linear.values(0, linear.shape[0], FP32)
        for module, tensors in zip(PARTS, parts, strict=True):
            if tensors is None:
                continue
            for last in ("weight", "weight_scale", "input_scale"):
                name = f"{module}.{last}"
                folder.change(name, lambda held, name=name: held.pop(name))
            folder.change(
                f"{module}.x", lambda held, m=module, t=tensors: held.update({f"{m}.{k}": v for k, v in t.items()})
            )
        plan = folder.plan()
        assert plan.problems == []
        return plan, before

    return make


def values_of(seed: int) -> torch.Tensor:
    return torch.randn(256, 192, generator=torch.Generator().manual_seed(seed)).bfloat16()


def fp8_with(scale: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"weight": values_of(3).to(torch.float8_e4m3fn), "weight_scale": scale}


@pytest.mark.parametrize("part", [0, 1, 2])
def test_values_beside_codes(mixed: Callable[..., Any], part: int) -> None:
    """Wherever the values are, first or last: counted as mixed, never used as codes, each row what it stands for."""
    kept = values_of(part)
    plan, expected = mixed(*({"weight": kept} if at == part else None for at in range(3)))
    linear = plan.linears[QKV]
    assert linear.coding == "codes, scale per channel + values"
    assert codings(plan)["codes, scale per channel + values"] == 1
    assert QKV in plan.kept
    assert (linear.has_codes(FP8), linear.has_codes(INT8), linear.rotation) == (False, False, 0)
    assert linear.value_dtype is torch.bfloat16
    expected[256 * part : 256 * (part + 1)] = kept.float()
    assert torch.equal(linear.values(0, 768, FP32), expected)
    for first, count in [(256 * part, 256), (256 * part + 3, 5), (200, 400)]:
        found = linear.values(first, count, torch.bfloat16)
        assert torch.equal(found, expected[first : first + count].bfloat16())


def test_codes_of_several_scales(mixed: Callable[..., Any]) -> None:
    """One scale for all of q and one for each row of the rest are one scale a row: the codes stay."""
    plan, expected = mixed(fp8_with(torch.tensor(0.5)), None, None)
    linear = plan.linears[QKV]
    assert linear.coding == "codes, scale per channel + codes, scale per tensor"
    assert codings(plan)[linear.coding] == 1
    assert QKV not in plan.kept
    assert linear.has_codes(FP8)
    expected[:256] = values_of(3).to(torch.float8_e4m3fn).float() * 0.5
    for first, count in [(0, 768), (250, 12), (255, 1), (600, 168)]:
        wanted = expected[first : first + count]
        assert torch.equal(linear.codes(first, count).float() * linear.row_scale(first, count), wanted)
        assert torch.equal(linear.values(first, count, FP32), wanted)


@pytest.mark.parametrize("part", [0, 2])
def test_a_block_among_rows_is_decoded(mixed: Callable[..., Any], part: int) -> None:
    grid = torch.tensor([[0.5, 2.0], [1.0, 4.0]])
    plan, expected = mixed(*(fp8_with(grid) if at == part else None for at in range(3)))
    linear = plan.linears[QKV]
    assert linear.coding == "codes, scale by block + codes, scale per channel"
    assert not linear.has_codes(FP8)
    spread = grid.repeat_interleave(128, 0).repeat_interleave(128, 1)[:, :192]
    expected[256 * part : 256 * (part + 1)] = values_of(3).to(torch.float8_e4m3fn).float() * spread
    assert torch.equal(linear.values(0, 768, FP32), expected)


def parts(tmp_path: Path, *stored: tuple[torch.Tensor, Coding]) -> StoredLinear:
    tensors = {f"{index}.weight": tensor.clone() for index, (tensor, _) in enumerate(stored)}
    save_file(tensors, tmp_path / "parts.safetensors")
    entries = read_header(tmp_path / "parts.safetensors").entries
    segments = tuple(
        Segment(entries[name], coding, 0, len(tensor))
        for (name, tensor), (_, coding) in zip(tensors.items(), stored, strict=True)
    )
    rows = sum(segment.rows for segment in segments)
    return StoredLinear("mixed", (rows, 16), segments, {"": (0, rows)})


CODES = torch.zeros(2, 16, dtype=torch.int8)


@pytest.mark.parametrize("rotations", [(16, 0), (0, 16), (16, 8), (16, 16)])
def test_rotation_is_that_of_all_rows(tmp_path: Path, rotations: tuple[int, ...]) -> None:
    """Codes that were rotated in part fit no method, whichever part comes first."""
    linear = parts(tmp_path, *((CODES, Scaled(torch.ones(2, 1), 1, 16, rotation=rotation)) for rotation in rotations))
    one = len(set(rotations)) == 1
    assert linear.rotation == (rotations[0] if one else 0)
    assert linear.has_codes(INT8) is one


@pytest.mark.parametrize(
    ("dtypes", "wanted"),
    [
        ((torch.bfloat16, torch.bfloat16), torch.bfloat16),
        ((torch.float32, torch.bfloat16), torch.float32),
        ((torch.bfloat16, torch.float32), torch.float32),
        ((torch.float16, torch.float16), torch.float16),
        ((torch.float16, None), torch.bfloat16),
        ((None, torch.float32), torch.bfloat16),
        ((None, None), torch.bfloat16),
    ],
)
def test_dtype_of_values(tmp_path: Path, dtypes: tuple[torch.dtype | None, ...], wanted: torch.dtype) -> None:
    """The order of the parts does not matter: none loses digits to another, and codes are decoded to bf16."""
    stored = [
        (CODES, Scaled(torch.ones(2, 1), 1, 16)) if dtype is None else (torch.ones(2, 16, dtype=dtype), Values())
        for dtype in dtypes
    ]
    assert parts(tmp_path, *stored).value_dtype is wanted


def test_a_text_encoder_of_several_dtypes(tmp_path: Path) -> None:
    """Each part arrives in the dtype of the whole weight's values."""
    q, k, v = (torch.randn(2, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    tensors = {"q": q.bfloat16(), "k": k, "v": v.half()}
    save_file({f"{STREAMED}.{part}_proj.weight": value for part, value in tensors.items()}, tmp_path / "m.safetensors")
    plan = plan_text_encoder(open_checkpoint(tmp_path), 1)
    assert plan.problems == []

    def nothing(entry: Any) -> None:
        """No progress is shown."""

    found = dict(encoder_stream(plan, (), arrive=nothing, done=nothing))
    for part, value in tensors.items():
        assert torch.equal(found[f"{STREAMED}.{part}_proj.weight"], value.float()), part
