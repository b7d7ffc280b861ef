"""Attention's producers: norm and rotation while Q and K are read, and V's mean with codes for what follows.

They must give the bytes of the engine's norm and rotation, or of the mean by itself, followed by the plain kernels.
"""

from __future__ import annotations

from itertools import pairwise

import engine_kernels
import pytest
import torch

from vllm_h3_quant.kernels import attention
from vllm_h3_quant.kernels.attention.documents import locate_documents_reference
from vllm_h3_quant.kernels.attention.mean import add_mean, mean_codes, with_mean, with_mean_reference
from vllm_h3_quant.kernels.attention.rotary import Rotary, rotary_of
from vllm_h3_quant.kernels.attention.scaling import scaling_triton
from vllm_h3_quant.kernels.formats import FP8
from vllm_h3_quant.kernels.quantize import quantized
from vllm_h3_quant.kernels.rows import RowFormat

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZE, TURNED = 128, 96
HEADS = 8 if torch.cuda.is_available() else 1
EPS = 1e-5
PACKINGS = pytest.mark.parametrize("lengths", [[1], [129, 0, 6]], ids=str)
ROW_FORMATS = pytest.mark.parametrize("row_format", [RowFormat("fp8", 0), RowFormat("int8", 128)], ids=str)


def bounds(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)


def projection(tokens: int, *, huge: bool = False) -> tuple[torch.Tensor, ...]:
    """q, k and v as views of what a qkv projection writes, with outlier channels and a row of zeros."""
    qkv = torch.randn(tokens, 3, HEADS, SIZE, generator=torch.Generator().manual_seed(tokens)) * 3
    qkv[:, 1, :, :4] *= 60
    qkv[:, :, 0, 7] += 11
    qkv[0] = 0.0
    if huge:
        qkv[tokens // 2] *= 1e18
    return qkv.bfloat16().to(DEVICE).unbind(1)


def rotary(tokens: int) -> Rotary:
    generator = torch.Generator().manual_seed(5)
    angle = torch.rand(tokens, TURNED // 2, generator=generator) * 6
    table = torch.cat((angle.cos(), angle.sin()), dim=1).bfloat16().to(DEVICE)
    weights = [(1 + 0.2 * torch.randn(SIZE, generator=generator)).bfloat16().to(DEVICE) for _ in range(2)]
    return rotary_of(*weights, table, EPS, heads=HEADS)


def by_engine(q: torch.Tensor, k: torch.Tensor, wanted: Rotary) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        engine_kernels.norm_rope(q, wanted.q_weight, wanted.table, EPS),
        engine_kernels.norm_rope(k, wanted.k_weight, wanted.table, EPS),
    )


@pytest.mark.parametrize(
    ("lengths", "by_head", "huge"), [([1], False, False), ([129, 0, 6], False, True), ([130, 5], True, True)], ids=str
)
def test_norm_and_rotation_while_reading(lengths: list[int], by_head: bool, huge: bool) -> None:
    tokens = sum(lengths)
    q, k, v = projection(tokens, huge=huge)
    turns, documents = rotary(tokens), locate_documents_reference(bounds(lengths), tokens, max(lengths))
    found = scaling_triton(q, k, v, documents, v_format=FP8, by_head=by_head, rotary=turns)
    q_turned, k_turned = by_engine(q, k, turns)
    wanted = scaling_triton(q_turned, k_turned, v, documents, v_format=FP8, by_head=by_head)
    for name, one, other in zip(wanted._fields, found, wanted, strict=True):
        assert torch.equal(one.nan_to_num(), other.nan_to_num()), name
    for name, one, other in zip("qk", turns.rows, (q_turned, k_turned), strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), name


def test_the_rotation_is_there() -> None:
    """The mean of K after the rotation is another one than before; both tests above would pass without it."""
    q, k, v = projection(131)
    turns, documents = rotary(131), locate_documents_reference(bounds([131]), 131, 131)
    found = scaling_triton(q, k, v, documents, v_format=FP8, by_head=False, rotary=turns)
    normed = k.float() / (k.float().square().mean(-1, keepdim=True) + EPS).sqrt() * turns.k_weight.float()
    cos, sin = turns.table.float()[:, None].chunk(2, dim=-1)
    first, second, rest = normed.split((TURNED // 2, TURNED // 2, SIZE - TURNED), dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
    # bf16 keeps 2^-9 of a value on average, the interpreter's truncation 2^-8 of each of two.
    torch.testing.assert_close(found.k_mean[0], turned.mean(0), rtol=0.02, atol=0.02)


def test_mean_goes_back_to_its_document() -> None:
    documents = locate_documents_reference(bounds([130, 0, 3]), 133, 130)
    out = torch.zeros(133, 2, 64, dtype=torch.bfloat16, device=DEVICE)
    mean = torch.randn(3, 2, 64, device=DEVICE).bfloat16().float()
    add_mean(out, mean, documents)
    for document, (begin, end) in enumerate(pairwise(bounds([130, 0, 3]).tolist())):
        assert torch.equal(out[begin:end].float(), mean[document].expand(end - begin, 2, 64))


@ROW_FORMATS
@PACKINGS
def test_mean_and_codes_in_one(lengths: list[int], row_format: RowFormat) -> None:
    tokens = sum(lengths)
    documents = locate_documents_reference(bounds(lengths), tokens, max(lengths))
    out = torch.randn(tokens, HEADS, SIZE, generator=torch.Generator().manual_seed(1)).bfloat16().to(DEVICE)
    out[0, :, 3] = 4e4
    mean = torch.randn(len(lengths), HEADS, SIZE, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    found = mean_codes(out, mean, documents, row_format)
    wanted = quantized(add_mean(out.clone(), mean, documents).flatten(1), row_format)
    assert torch.equal(found.codes.view(torch.uint8), wanted.codes.view(torch.uint8))
    assert torch.equal(found.scale, wanted.scale)


def test_plain_form_of_the_mean() -> None:
    documents = locate_documents_reference(bounds([2, 3]), 5, 3)
    out, mean = torch.zeros(5, 2, 64), torch.arange(2.0)[:, None, None].expand(2, 2, 64) + 1
    values = with_mean_reference(out, mean, documents, torch.bfloat16, None)
    assert values[:, 0, 0].tolist() == [1, 1, 2, 2, 2]
    rows = with_mean_reference(out, mean, documents, torch.bfloat16, RowFormat("int8", 0))
    assert rows.codes.unique().tolist() == [127]
    halves = with_mean(out.half().to(DEVICE), mean.contiguous().to(DEVICE), documents, torch.float16, None)
    assert halves.dtype is torch.float16


@ROW_FORMATS
@pytest.mark.parametrize("kind", attention.KINDS)
def test_codes_are_those_of_the_values(kind: str, row_format: RowFormat) -> None:
    if DEVICE.type == "cuda" and kind == "fp8" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("fp8 attention needs sm_90")
    q, k, v = projection(150)
    call = {"max_seqlen": 90, "softmax_scale": SIZE**-0.5, "kind": kind}
    rows = attention.attend_fused(q, k, v, bounds([90, 60]), rotary=None, row_format=row_format, **call)
    wanted = quantized(attention.attend(q, k, v, bounds([90, 60]), **call).flatten(1), row_format)
    assert torch.equal(rows.codes.view(torch.uint8), wanted.codes.view(torch.uint8))
    assert torch.equal(rows.scale, wanted.scale)
    empty = attention.attend_fused(q[:0], k[:0], v[:0], bounds([0]), rotary=None, row_format=row_format, **call)
    assert empty.shape == (0, HEADS * SIZE)
