"""8-bit attention: the plain PyTorch form against its definition, the Triton kernels against the plain form.

The Triton kernels run under the interpreter on a CPU and natively on a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_h3_quant.kernels import attention
from vllm_h3_quant.kernels.attention import backends
from vllm_h3_quant.kernels.attention.codes import (
    KEY_ORDER,
    slot_codes_reference,
    slot_codes_triton,
    token_codes_reference,
    token_codes_triton,
)
from vllm_h3_quant.kernels.attention.documents import (
    TILE,
    Documents,
    locate_documents_reference,
    locate_documents_triton,
    most_tiles,
)
from vllm_h3_quant.kernels.attention.fp8 import fp8_attention_flash, fp8_attention_reference
from vllm_h3_quant.kernels.attention.int8 import int8_attention_reference, int8_attention_triton, keys_in_order
from vllm_h3_quant.kernels.attention.scaling import Scaling, scaling_reference, scaling_triton
from vllm_h3_quant.kernels.backend import NoBackend
from vllm_h3_quant.kernels.formats import FP8, INT8, CodeFormat
from vllm_h3_quant.testing.attention import Outliers, exact_attention, synthetic_qkv
from vllm_h3_quant.testing.numeric import relative_l2

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PACKINGS = {
    "one token": [1],
    "one tile": [128],
    "odd": [131],
    "several, one empty, one of a token": [200, 0, 1, 129],
    "padding after a document": [250, 6],
}
PACKED = pytest.mark.parametrize("lengths", PACKINGS.values(), ids=PACKINGS.keys())
SIZES = pytest.mark.parametrize("size", [64, 128])
SIZES_AND_FORMATS = pytest.mark.parametrize(
    ("size", "v_format"), [(64, INT8), (128, FP8)], ids=["64, INT8", "128, FP8"]
)

# Rounding P and V to e4m3 moves each by 2^-4 at most, 2^-4 / sqrt(3) on average if errors fill that range evenly;
# scores of at most a few units move by less.
Run = Callable[..., torch.Tensor]
EIGHT_BIT = 2 * 2**-4 / 3**0.5
# A probability that lies beside a tie may round to the other side: one in 500 by a step of 2^-3.
SAME_CODES = 0.006


def bounds(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)


def packed(lengths: list[int], size: int, heads: int = 1) -> tuple[torch.Tensor, ...]:
    """Views of one qkv tensor, with channels of different mean and spread in each document."""
    tokens = sum(lengths)
    parts = [synthetic_qkv(n, heads, size, 1.6, device=DEVICE, seed=i) for i, n in enumerate(lengths) if n]
    qkv = torch.stack([torch.cat([part[i] for part in parts]) for i in range(3)], dim=1)
    assert qkv.shape == (tokens, 3, heads, size)
    return qkv.unbind(1)


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    pieces = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    return torch.cat([exact_attention(*piece, q.shape[-1] ** -0.5) for piece in pieces])


def prepared(
    lengths: list[int], size: int, v_format: CodeFormat = FP8, *, by_head: bool = False
) -> tuple[tuple[torch.Tensor, ...], Documents, Scaling]:
    qkv = packed(lengths, size)
    documents = locate_documents_reference(bounds(lengths), sum(lengths), max(lengths))
    return qkv, documents, scaling_reference(*qkv, documents, v_format=v_format, by_head=by_head)


class TestDocuments:
    @settings(max_examples=25, deadline=None)
    @given(lengths=st.lists(st.integers(0, 700), min_size=1, max_size=6), spare=st.integers(0, 300))
    def test_kernel_agrees_with_reference(self, lengths: list[int], spare: int) -> None:
        cu, tokens = bounds(lengths), sum(lengths) + spare
        reference, kernel = locate_documents_reference(cu, tokens, tokens), locate_documents_triton(cu, tokens, tokens)
        assert torch.equal(kernel.tiles, reference.tiles)
        assert torch.equal(kernel.spans, reference.spans)

    @given(lengths=st.lists(st.integers(0, 5000), min_size=1, max_size=9), spare=st.integers(0, 300))
    def test_no_packing_needs_more_tiles_than_are_made(self, lengths: list[int], spare: int) -> None:
        assert sum(-(-n // TILE) for n in lengths) <= most_tiles(len(lengths), sum(lengths) + spare)

    def test_a_tile_belongs_to_one_document(self) -> None:
        documents = locate_documents_reference(bounds([130, 0, 5]), 140, 130)
        assert documents.tiles.tolist() == [[0, 0, 128], [0, 128, 2], [2, 130, 5], [0, 0, 0]]
        assert documents.spans.tolist() == [[0, 2, 130], [2, 0, 0], [2, 1, 5]]


class TestScaling:
    @PACKED
    @pytest.mark.parametrize("by_head", [False, True])
    def test_kernel_agrees_with_reference(self, lengths: list[int], by_head: bool) -> None:
        qkv, documents, reference = prepared(lengths, 128, by_head=by_head)
        kernel = scaling_triton(*qkv, documents, v_format=FP8, by_head=by_head)
        many = torch.tensor(lengths, device=DEVICE) > 1
        for name, found, wanted in zip(Scaling._fields, kernel, reference, strict=True):
            assert found.shape == wanted.shape
            if not wanted.numel():
                continue
            # fp32 sums of up to 250 values of either sign, and the fourth root of a quotient of them.
            torch.testing.assert_close(
                found[many], wanted[many], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )

    def test_a_document_has_its_own_means(self) -> None:
        qkv, _, scaling = prepared([200, 129], 64)
        torch.testing.assert_close(scaling.k_mean[1], qkv[1][200:].float().mean(0), rtol=1e-5, atol=1e-5)

    def test_balance_evens_out_the_channels(self) -> None:
        (q, k, _), _, scaling = prepared([700], 128)
        rms_q = (q.float() * scaling.q_factor[0]).square().mean(0)
        rms_k = ((k.float() - scaling.k_mean[0]) * scaling.k_factor[0]).square().mean(0)
        torch.testing.assert_close(rms_q, rms_k, rtol=1e-3, atol=1e-3)

    def test_bound_of_a_head_holds_every_rotated_value(self) -> None:
        qkv, documents, scaling = prepared([300, 77], 128, by_head=True)
        codes = token_codes_reference(*qkv, documents, scaling)
        largest = max(float(x.float().abs().max()) for x in codes[:2])
        assert 1 < largest <= FP8.max


class TestCodes:
    @PACKED
    @SIZES_AND_FORMATS
    def test_kernel_gives_the_reference_bytes(self, lengths: list[int], size: int, v_format: CodeFormat) -> None:
        qkv, documents, scaling = prepared(lengths, size, v_format)
        reference = slot_codes_reference(*qkv, documents, scaling, v_format)
        kernel = slot_codes_triton(*qkv, documents, scaling, v_format)
        for name, found, wanted in zip(reference._fields, kernel, reference, strict=True):
            assert found.shape == wanted.shape, name
            assert torch.equal(found.reshape(-1).view(torch.uint8), wanted.reshape(-1).view(torch.uint8)), name

    @PACKED
    @SIZES
    def test_kernel_gives_the_reference_bytes_at_tokens(self, lengths: list[int], size: int) -> None:
        qkv, documents, scaling = prepared(lengths, size, by_head=True)
        reference = token_codes_reference(*qkv, documents, scaling)
        kernel = token_codes_triton(*qkv, documents, scaling)
        for name, found, wanted in zip(reference._fields, kernel, reference, strict=True):
            assert torch.equal(found.reshape(-1).view(torch.uint8), wanted.reshape(-1).view(torch.uint8)), name

    def test_product_of_codes_is_the_score(self) -> None:
        (q, k, v), documents, scaling = prepared([200], 128)
        codes = slot_codes_reference(q, k, v, documents, scaling, FP8)
        y_q = codes.q[:, :200].double() * codes.q_divisor[:, :200, None]
        y_k = codes.k[:, :200].double() * codes.k_divisor.repeat_interleave(TILE, 1)[:, :200, None]
        centred = k.double() - k.double().mean(0)
        wanted = torch.einsum("ihd,jhd->hij", q.double(), centred)
        # Two operands of 127 steps for a peak of about three times the RMS, each off by a step / sqrt(12) on average.
        assert relative_l2(y_q @ y_k.transpose(1, 2) / 128, wanted) < 2**0.5 * 4 / 127 / 12**0.5

    def test_values_come_back_in_the_order_of_the_tokens(self) -> None:
        (q, k, v), documents, scaling = prepared([131], 64, INT8)
        codes = slot_codes_reference(q, k, v, documents, scaling, INT8)
        values = keys_in_order(codes.v)[:, :131].transpose(0, 1) * scaling.v_divisor[0] + scaling.v_mean[0]
        assert float((values - v.float()).abs().max()) <= float(scaling.v_divisor.max()) * 0.51
        assert sorted(KEY_ORDER) == list(range(16))

    def test_offsets_past_2_to_the_32(self) -> None:
        """Rows of one qkv tensor of 200,000 tokens lie that far apart; only their pages are touched here."""
        stride, heads, size = 2**30 + 64, 1, 64
        if DEVICE.type == "cuda":
            pytest.skip("the long benchmark covers it on a GPU")
        far = torch.empty(4 * stride + heads * size, dtype=torch.bfloat16).as_strided(
            (5, heads, size), (stride, size, 1)
        )
        near = packed([5], size)
        documents = locate_documents_reference(bounds([5]), 5, 5)
        wanted = scaling_triton(*near, documents, v_format=FP8, by_head=False)
        far.copy_(near[1])
        operands = (near[0], far, near[2])
        scaling = scaling_triton(*operands, documents, v_format=FP8, by_head=False)
        assert torch.equal(scaling.k_mean, wanted.k_mean)
        codes = slot_codes_triton(*operands, documents, scaling, FP8)
        assert torch.equal(codes.k, slot_codes_triton(*near, documents, wanted, FP8).k)


class TestInt8Attention:
    @PACKED
    @SIZES_AND_FORMATS
    def test_kernel_agrees_with_reference_on_the_same_codes(
        self, lengths: list[int], size: int, v_format: CodeFormat
    ) -> None:
        qkv, documents, scaling = prepared(lengths, size, v_format)
        codes = slot_codes_reference(*qkv, documents, scaling, v_format)
        arguments = (codes, scaling, documents, size**-0.5, torch.float32)
        assert relative_l2(int8_attention_triton(*arguments), int8_attention_reference(*arguments)) < SAME_CODES

    def test_plain_loads_give_the_same_bytes(self) -> None:
        qkv, documents, scaling = prepared([200, 131], 64)
        codes = slot_codes_reference(*qkv, documents, scaling, FP8)
        arguments = (codes, scaling, documents, 0.125, torch.bfloat16)
        loads, descriptors = (int8_attention_triton(*arguments, descriptors=taken) for taken in (False, True))
        assert torch.equal(loads, descriptors)

    def test_scores_far_below_zero_elsewhere(self) -> None:
        """All keys but one lie opposite to the queries: the empty slots, which score zero, stay out of the result."""
        q = torch.ones(40, 1, 64, device=DEVICE).bfloat16()
        k = -20 * torch.ones(40, 1, 64, device=DEVICE).bfloat16()
        k[7] = 20
        v = torch.randn(40, 1, 64, generator=torch.Generator().manual_seed(0)).to(DEVICE).bfloat16()
        documents = locate_documents_reference(bounds([40]), 40, 40)
        scaling = scaling_reference(q, k, v, documents, v_format=FP8, by_head=False)
        codes = slot_codes_triton(q, k, v, documents, scaling, FP8)
        out = int8_attention_triton(codes, scaling, documents, 1.0, torch.float32)
        # Of the value, and of its probability: at scores of 3600 the largest one is no power of two.
        rounding = 2 * 2**-4 * (v[7].float() - scaling.v_mean[0]).abs()
        assert ((out - v[7].float()).abs() <= rounding + 1e-4).all()


@pytest.fixture(params=["reference", "kernels"])
def run(request: pytest.FixtureRequest) -> Run:
    """INT8 attention with FP8 values, in plain PyTorch and by the kernels."""
    plain = next(b for b in attention.BACKENDS if b.kind == "int8" and b.capabilities is None)
    backend = plain if request.param == "reference" else attention.BACKENDS[0]
    return lambda *arguments: backend.run(backends.Call(*arguments))


class TestWhole:
    @PACKED
    @SIZES
    def test_close_to_exact_attention(self, lengths: list[int], size: int, run: Run) -> None:
        q, k, v = packed(lengths, size)
        out = run(q, k, v, bounds(lengths), max(lengths), size**-0.5)
        assert out.is_contiguous()
        assert relative_l2(out, exact(q, k, v, lengths)) < EIGHT_BIT

    @pytest.mark.parametrize("outliers", list(Outliers))
    def test_outliers(self, outliers: Outliers, run: Run) -> None:
        q, k, v = synthetic_qkv(260, 1, 128, 2.8, device=DEVICE, outliers=outliers)
        assert relative_l2(run(q, k, v, bounds([260]), 260, 128**-0.5), exact(q, k, v, [260])) < EIGHT_BIT

    def test_documents_do_not_see_each_other(self, run: Run) -> None:
        lengths = [200, 131]
        q, k, v = packed(lengths, 64)
        before = run(q, k, v, bounds(lengths), 200, 0.125)
        other = [x.clone() for x in (q, k, v)]
        for x in other:
            x[200:] = 17
        after = run(*other, bounds(lengths), 200, 0.125)
        assert torch.equal(before[:200], after[:200])
        assert torch.equal(before[:200], run(q[:200], k[:200], v[:200], bounds([200]), 200, 0.125))

    def test_a_document_of_one_token_gives_its_value(self, run: Run) -> None:
        q, k, v = packed([130, 1], 128)
        assert torch.equal(run(q, k, v, bounds([130, 1]), 130, 1.0)[130], v[130])

    def test_zeros(self, run: Run) -> None:
        zero = torch.zeros(30, 2, 64, dtype=torch.bfloat16, device=DEVICE)
        assert not run(zero, zero, zero, bounds([30]), 30, 0.125).any()

    def test_equal_values_come_out_as_they_are(self, run: Run) -> None:
        q, k, v = packed([150], 64)
        out = run(q, k, torch.full_like(v, 3.25), bounds([150]), 150, 0.125)
        assert torch.equal(out, torch.full_like(out, 3.25))

    @pytest.mark.parametrize("poisoned", [0, 1, 2], ids=["q", "k", "v"])
    @pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
    def test_what_is_not_finite_is_not_hidden(self, poisoned: int, value: float, run: Run) -> None:
        operands = [x.clone() for x in packed([140, 20], 64, heads=2)]
        operands[poisoned][33, 1, 5] = value
        out = run(*operands, bounds([140, 20]), 140, 0.125)
        assert not out[33, 1, 5 if poisoned == 2 else slice(None)].isfinite().any()
        assert out[140:].isfinite().all()
        assert out[:, 0].isfinite().all()

    def test_the_same_bytes_each_time(self, run: Run) -> None:
        operands = packed([300], 128)
        first, second = (run(*operands, bounds([300]), 300, 0.1) for _ in range(2))
        assert torch.equal(first, second)


class FlashAttention:
    """In place of fa3-fwd where there is no GPU for it: its formula, with probabilities that are not rounded."""

    @staticmethod
    def flash_attn_varlen_func(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        q_descale: torch.Tensor,
        k_descale: torch.Tensor,
        v_descale: torch.Tensor,
        softmax_scale: float,
    ) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=torch.bfloat16)
        assert torch.equal(cu_seqlens_q, cu_seqlens_k)
        for document, (begin, end) in enumerate(pairwise(cu_seqlens_q.tolist())):
            assert end - begin <= max_seqlen_q == max_seqlen_k
            parts = [
                x[begin:end].float() * scale[document][:, None]
                for x, scale in ((q, q_descale), (k, k_descale), (v, v_descale))
            ]
            out[begin:end] = exact_attention(*parts, softmax_scale).bfloat16()
        return out


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the GPU's own tests run the real one")
def test_flash_attention_is_given_what_the_formula_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", FlashAttention)
    lengths = [150, 0, 60]
    qkv, documents, scaling = prepared(lengths, 64, by_head=True)
    codes = token_codes_triton(*qkv, documents, scaling)
    arguments = (codes, scaling, documents, 64**-0.5)
    found, wanted = fp8_attention_flash(*arguments), fp8_attention_reference(*arguments)
    # The plain form rounds probabilities, and the kernel its output twice.
    assert relative_l2(found, wanted) < 2**-4 / 3**0.5 + 2 * 2**-8


class TestOperator:
    @pytest.mark.parametrize("kind", attention.KINDS)
    def test_is_a_proper_operator(self, kind: str) -> None:
        if DEVICE.type == "cuda" and kind == "fp8" and torch.cuda.get_device_capability()[0] != 9:
            pytest.skip("fp8 attention needs sm_90")
        q, k, v = packed([70], 64)
        arguments = (q, k, v, bounds([70]), 70, 0.125, kind)
        torch.library.opcheck(torch.ops.h3_quant.attention.default, arguments)

    @pytest.mark.parametrize("kind", attention.KINDS)
    def test_kind_on_the_cpu(self, kind: str) -> None:
        if DEVICE.type == "cuda":
            pytest.skip("the GPU's own tests cover it")
        q, k, v = packed([200, 30], 128)
        out = attention.attend(q, k, v, bounds([200, 30]), max_seqlen=200, softmax_scale=128**-0.5, kind=kind)
        # FP8 rounds Q and K by 2^-4 as well: at an RMS of 1.6 scores move by 128^.5 1.6^2 2^-4 / sqrt(3 * 128).
        assert relative_l2(out, exact(q, k, v, [200, 30])) < EIGHT_BIT + 0.05 * (kind == "fp8")

    def test_nothing_to_do(self) -> None:
        q = torch.empty(0, 2, 64, dtype=torch.bfloat16, device=DEVICE)
        assert attention.attend(q, q, q, bounds([0]), max_seqlen=0, softmax_scale=1.0, kind="int8").shape == q.shape

    def test_refusals_name_the_fault(self) -> None:
        q, k, v = packed([20], 64)
        with pytest.raises(ValueError, match="differ in shape"):
            attention.attend(q, k[:5], v, bounds([20]), max_seqlen=20, softmax_scale=1.0, kind="int8")
        with pytest.raises(ValueError, match=r"head size 32 .* \(64, 128\)"):
            attention.attend(
                q[..., :32], k[..., :32], v[..., :32], bounds([20]), max_seqlen=20, softmax_scale=1.0, kind="int8"
            )
        turned = q.transpose(0, 2).contiguous().transpose(0, 2)
        with pytest.raises(ValueError, match="next to each other"):
            attention.attend(turned, k, v, bounds([20]), max_seqlen=20, softmax_scale=1.0, kind="int8")


class TestTable:
    @pytest.mark.parametrize(
        ("kind", "capability", "name"),
        [
            ("int8", (8, 0), "Triton INT8 attention, INT8 V"),
            ("int8", (8, 6), "Triton INT8 attention, INT8 V"),
            ("int8", (8, 9), "Triton INT8 attention, FP8 V"),
            ("int8", (9, 0), "Triton INT8 attention, FP8 V"),
            ("int8", (12, 0), "Triton INT8 attention, FP8 V"),
            ("int8", None, "PyTorch reference INT8 attention"),
            ("fp8", None, "PyTorch reference FP8 attention"),
        ],
    )
    def test_selection(self, kind: str, capability: tuple[int, int] | None, name: str) -> None:
        assert attention.select(kind, capability).name == name

    def test_fp8_takes_flash_attention_on_hopper(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert attention.select("fp8", (9, 0)).name == "FlashAttention-3 FP8"
        with pytest.raises(NoBackend, match=r"FlashAttention-3 FP8 is not built for sm_100"):
            attention.select("fp8", (10, 0))
        with pytest.raises(NoBackend, match="needs sm_90"):
            attention.select("fp8", (8, 9))

    @pytest.mark.parametrize(
        ("capability", "kind"),
        [((7, 5), None), ((8, 0), "int8"), ((8, 9), "int8"), ((9, 0), "fp8"), ((10, 0), None), ((12, 0), "int8")],
    )
    def test_auto(self, capability: tuple[int, int], kind: str | None) -> None:
        chosen, reason = attention.choose(capability, 0.11)
        assert chosen == kind
        assert reason

    def test_auto_within_an_error(self) -> None:
        assert attention.choose((9, 0), 0.05) == (
            "int8",
            "the fastest within 5% on sharp scores; fp8 may be 11.0% off on sharp scores",
        )
        assert attention.choose((9, 0), 0.001)[0] is None
