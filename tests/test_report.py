"""The lines of the load report."""

from __future__ import annotations

from vllm_h3_quant.report import ComponentReport, LoadReport, lines


def report(**kernels: int) -> LoadReport:
    part = ComponentReport(linears=31, quantized=sum(kernels.values()), kernels=kernels, weight_bytes=3 << 20)
    return LoadReport(method="h3_fp8", components={"transformer": part})


def test_one_kernel_is_named_without_a_count() -> None:
    assert lines(report(cutlass=25)) == [
        "transformer: 25 of 31 linears quantized by h3_fp8 (cutlass), 3.0 MiB of linear weights on this rank"
    ]


def test_several_kernels_are_counted() -> None:
    assert "by h3_fp8 (20 cublas, 5 cutlass)," in lines(report(cublas=20, cutlass=5))[0]


def test_nothing_quantized_names_no_method() -> None:
    assert lines(report()) == ["transformer: 0 of 31 linears quantized, 3.0 MiB of linear weights on this rank"]
