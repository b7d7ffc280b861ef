"""8-bit attention at the sizes of real clips, against fp32 attention on sampled tokens."""

from __future__ import annotations

import pytest
import torch

from vllm_h3_quant.kernels.attention import KINDS, SHARP_ERROR, attend, select
from vllm_h3_quant.kernels.backend import NoBackend
from vllm_h3_quant.testing.attention import Outliers, exact_attention, synthetic_qkv
from vllm_h3_quant.testing.numeric import relative_l2

pytestmark = pytest.mark.gpu

SIZE = 128
SCALE = SIZE**-0.5
FOUR_SECONDS = 32_704
# By the RMS of q and k: what emulation in fp32 gives for operands of this kind, and a tenth more.
BOUNDS = {
    "int8": {1.6: 0.0030, 2.8: 0.022, 4.0: SHARP_ERROR["int8"]},
    "fp8": {1.6: 0.0055, 2.8: 0.062, 4.0: SHARP_ERROR["fp8"]},
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    try:
        select(request.param, torch.cuda.get_device_capability())
    except NoBackend as error:
        pytest.skip(str(error))
    return str(request.param)


@pytest.fixture(autouse=True)
def full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


def bounds(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32, device="cuda").cumsum(0, dtype=torch.int32)


def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kind: str) -> torch.Tensor:
    return attend(q, k, v, bounds(q.shape[0]), max_seqlen=q.shape[0], softmax_scale=SCALE, kind=kind)


def error(kind: str, tokens: int, amplitude: float, outliers: Outliers = Outliers.NONE, heads: int = 16) -> float:
    q, k, v = synthetic_qkv(tokens, heads, SIZE, amplitude, device=torch.device("cuda"), outliers=outliers)
    rows = torch.randint(tokens, (256,), generator=torch.Generator("cuda").manual_seed(1), device="cuda")
    exact = exact_attention(q, k, v, SCALE, rows=rows, dtype=torch.float32)
    return relative_l2(run(q, k, v, kind)[rows], exact)


@pytest.mark.parametrize("amplitude", [1.6, 2.8, 4.0])
def test_error_of_a_clip_of_four_seconds(kind: str, amplitude: float) -> None:
    assert error(kind, FOUR_SECONDS, amplitude) <= BOUNDS[kind][amplitude]


@pytest.mark.parametrize("outliers", [Outliers.HUGE_K, Outliers.ROTARY])
@pytest.mark.parametrize("amplitude", [1.6, 2.8, 4.0])
def test_error_with_outliers(kind: str, amplitude: float, outliers: Outliers) -> None:
    assert error(kind, FOUR_SECONDS, amplitude, outliers) <= 2 * BOUNDS[kind][amplitude]


@pytest.mark.parametrize("amplitude", [2.8, 4.0])
def test_error_does_not_grow_with_the_clip(kind: str, amplitude: float) -> None:
    assert error(kind, 196_608, amplitude) <= 1.2 * error(kind, 8_192, amplitude)


def test_rows_of_a_packed_clip_lie_past_2_to_the_32(kind: str) -> None:
    """The last rows of a qkv tensor of 200,064 tokens and 56 heads, of which two are computed."""
    tokens, heads = 200_064, 56
    qkv = torch.empty(tokens, 3, heads, SIZE, dtype=torch.bfloat16, device="cuda")
    near = synthetic_qkv(tokens, 2, SIZE, 1.6, device=qkv.device)
    for part, x in enumerate(near):
        qkv[:, part, -2:] = x
    q, k, v = (qkv[:, part, -2:] for part in range(3))
    assert v.storage_offset() + (tokens - 1) * v.stride(0) > 2**32
    assert torch.equal(run(q, k, v, kind), run(*near, kind=kind))


def test_documents_are_computed_as_if_alone(kind: str) -> None:
    lengths = (1_000, 1, 4_097, 62)
    q, k, v = synthetic_qkv(sum(lengths), 4, SIZE, 2.8, device=torch.device("cuda"))
    together = attend(q, k, v, bounds(*lengths), max_seqlen=max(lengths), softmax_scale=SCALE, kind=kind)
    begin = 0
    for length in lengths:
        part = slice(begin, begin + length)
        alone = run(q[part], k[part], v[part], kind)
        # FlashAttention-3 may cut keys into other blocks, which rounds other probabilities.
        assert relative_l2(together[part], alone) <= (0 if kind == "int8" else 0.03)
        begin += length


def test_captured_graph_follows_its_inputs(kind: str) -> None:
    """Lengths are on the device: a replay packs other documents than the capture did."""
    total = 3_000
    q, k, v = (x.clone() for x in synthetic_qkv(total, 4, SIZE, 2.0, device=torch.device("cuda")))
    cu_seqlens = bounds(2_000, 1_000)

    def call() -> torch.Tensor:
        return attend(q, k, v, cu_seqlens, max_seqlen=total, softmax_scale=SCALE, kind=kind)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for seed, lengths in ((1, (2_000, 1_000)), (2, (130, 2_870))):
        for target, source in zip(
            (q, k, v), synthetic_qkv(total, 4, SIZE, 2.0, device=q.device, seed=seed), strict=True
        ):
            target.copy_(source)
        cu_seqlens.copy_(bounds(*lengths))
        graph.replay()
        assert torch.equal(captured, call())


def test_compiled_whole(kind: str) -> None:
    compiled = torch.compile(lambda q, k, v: run(q * 1, k, v, kind) + 1, fullgraph=True, dynamic=True)
    for tokens in (700, 1_300):
        q, k, v = synthetic_qkv(tokens, 2, SIZE, 2.0, device=torch.device("cuda"))
        assert torch.equal(compiled(q, k, v), run(q, k, v, kind) + 1)
