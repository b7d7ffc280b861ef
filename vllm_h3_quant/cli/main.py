"""The command's root: one line a subcommand, each in a module of its own."""

from __future__ import annotations

import typer

from vllm_h3_quant.cli.check import check
from vllm_h3_quant.cli.demo import demo
from vllm_h3_quant.cli.export import export

app = typer.Typer(
    name="vllm-h3-quant",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def root() -> None:
    """Serve MiniMax-H3 quantized with vLLM-Omni."""


app.command()(demo)
app.command()(check)
app.command()(export)


if __name__ == "__main__":
    app()
