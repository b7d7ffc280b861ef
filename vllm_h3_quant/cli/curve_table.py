"""The comparison of a pruned checkpoint with a full one, as a table."""

from __future__ import annotations

from rich.table import Table

from vllm_h3_quant.loader.curve import CHANGE, COSINE, RATIO, CurveReport, LayerCurve


def render(report: CurveReport) -> Table:
    """A row for each AdaLN projection; limits stand under the headings, the verdict under the table."""
    table = Table(
        title=f"{report.pruned} against {report.full}: {report.compared} of {report.grid} timesteps",
        caption=report.verdict,
    )
    table.add_column("AdaLN projection", no_wrap=True)
    for heading in (
        f"cosine min\n>= {COSINE}",
        "cosine\nmedian",
        f"ratio min\n>= {1 - RATIO}",
        "ratio\nmedian",
        f"ratio max\n<= {1 + RATIO}",
        f"change wrong by\n<= {CHANGE:.0%}",
        "bias off\nby",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    for layer in report.layers:
        table.add_row(*_cells(layer))
    return table


def _cells(layer: LayerCurve) -> list[str]:
    return [
        layer.name.removesuffix(".adaln_proj.linear"),
        f"{layer.cosine_min:.5f}",
        f"{layer.cosine_median:.5f}",
        f"{layer.ratio_min:.4g}",
        f"{layer.ratio_median:.4g}",
        f"{layer.ratio_max:.4g}",
        f"{layer.change_error:.2%}",
        f"{layer.bias_difference:.2g}",
        "good" if layer.good else "BAD",
    ]
