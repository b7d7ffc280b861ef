"""What a model's folder says of its DiT."""

from __future__ import annotations

from pathlib import Path

from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.loader.architecture import Architecture
from vllm_h3_quant.loader.checkpoint import read_json


def architecture(model: Path) -> Architecture:
    """Sizes of the DiT that the benchmarks load.

    Raises:
        H3QuantError: there is no model.
    """
    config = transformer(model) / "config.json"
    return Architecture.from_config(read_json(config), where=str(config))


def transformer(model: Path) -> Path:
    """The folder of a model's DiT.

    Raises:
        H3QuantError: there is no model.
    """
    for folder in (model / "FL2VA" / "transformer", model / "transformer"):
        if (folder / "config.json").is_file():
            return folder
    raise H3QuantError(
        f"{model} is no model root; give one, or write a synthetic one there: python benchmarks/synthetic_h3.py {model}"
    )
