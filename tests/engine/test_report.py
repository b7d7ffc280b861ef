"""The lines of the load report."""

from __future__ import annotations

from typing import Any

from vllm_h3_quant.engine.report import AttentionReport, ComponentReport, EdgeReport, LoadReport, lines


def report(**kernels: int) -> LoadReport:
    part = ComponentReport(linears=31, quantized=sum(kernels.values()), kernels=kernels, weight_bytes=3 << 20)
    return LoadReport(method="h3_fp8", components={"transformer": part})


def attention(**values: Any) -> str:
    part = ComponentReport(
        linears=1, quantized=0, kernels={}, weight_bytes=0, attention=AttentionReport(layers=5, **values)
    )
    said = lines(LoadReport(method=None, components={"transformer": part}))
    assert said[0].startswith("transformer: 0 of 1 linears")
    assert len(said) <= 2
    return said[1] if len(said) == 2 else ""


def test_one_kernel_is_named_without_a_count() -> None:
    assert lines(report(cutlass=25)) == [
        "transformer: 25 of 31 linears quantized by h3_fp8 (cutlass), 3.0 MiB of linear weights on this rank"
    ]


def test_several_kernels_are_counted() -> None:
    assert "by h3_fp8 (20 cublas, 5 cutlass)," in lines(report(cublas=20, cutlass=5))[0]


def test_linears_that_stay_are_told_with_their_reasons() -> None:
    part = report(cutlass=25).components["transformer"].model_copy(update={"kept": {"fp32 in and out": 4, "host": 2}})
    said = lines(LoadReport(method="h3_fp8", components={"transformer": part}))
    assert said[0].endswith("linear weights on this rank; as values: 4 fp32 in and out, 2 host")


def test_nothing_quantized_names_no_method() -> None:
    assert lines(report()) == ["transformer: 0 of 31 linears quantized, 3.0 MiB of linear weights on this rank"]


def test_attention_that_was_not_asked_for_is_not_mentioned() -> None:
    assert attention() == ""


def test_attention_names_its_kernel_and_what_is_kept() -> None:
    said = attention(quantized=3, kernels={"Triton INT8": 3}, kept={"token refiner, not asked for": 2})
    assert said == (
        "transformer: 3 of 5 attention layers in 8 bits (Triton INT8); the engine's: 2 token refiner, not asked for"
    )


def test_attention_says_why_auto_chose() -> None:
    said = attention(quantized=5, kernels={"Triton INT8": 5}, why="faster than fp8 here")
    assert said == "transformer: 5 of 5 attention layers in 8 bits (Triton INT8), auto: faster than fp8 here"
    assert attention(kept={"kept by auto": 5}, why="no kernel") == (
        "transformer: 0 of 5 attention layers in 8 bits, auto: no kernel; the engine's: 5 kept by auto"
    )


def test_edges_are_counted_where_fusion_is_asked_for() -> None:
    def said(**values: Any) -> list[str]:
        part = ComponentReport(linears=1, quantized=0, kernels={}, weight_bytes=0, fusion=EdgeReport(**values))
        return lines(LoadReport(method=None, components={"transformer": part}))[1:]

    assert said() == []
    assert said(edges=250, fused=250) == ["transformer: 250 of 250 edges of the blocks fused"]
    assert said(edges=250, fused=198, kept={"norm -> fc1 (wrapped)": 50, "SwiGLU -> fc2 (hook)": 2}) == [
        "transformer: 198 of 250 edges of the blocks fused; as values: 50 norm -> fc1 (wrapped), 2 SwiGLU -> fc2 (hook)"
    ]
