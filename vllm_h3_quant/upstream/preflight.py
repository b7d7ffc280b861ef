"""Refuses to start when a symbol this package relies on has moved.

The table names each symbol and the parameters it is used with. It is read when a method of this
package is asked for, never for other models.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version

from vllm_h3_quant.errors import H3QuantError

SUPPORTED = "0.30"


@dataclass(frozen=True)
class Symbol:
    """A function or class of another package.

    Attributes:
        package: distribution name.
        module: module path.
        name: attribute path inside the module.
        parameters: parameter names that must be there.
    """

    package: str
    module: str
    name: str
    parameters: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}"


SYMBOLS: tuple[Symbol, ...] = (
    Symbol("vllm-omni", "vllm_omni.quantization.factory", "_is_per_component_dict", ("spec",)),
    Symbol("vllm-omni", "vllm_omni.quantization.factory", "_build_component_config", ("spec",)),
    Symbol("vllm-omni", "vllm_omni.quantization.factory", "_build_single", ("method", "kwargs")),
    Symbol("vllm-omni", "vllm_omni.quantization", "register_quantization_override", ("method", "builder")),
    Symbol(
        "vllm-omni",
        "vllm_omni.diffusion.model_loader.diffusers_loader",
        "DiffusersPipelineLoader.load_weights",
        ("self", "model"),
    ),
    Symbol("vllm", "vllm.model_executor.layers.linear", "LinearMethodBase.apply", ("layer", "x", "bias")),
)


def problem(symbol: Symbol) -> str | None:
    """What is wrong with a symbol in this environment, or None."""
    try:
        found = importlib.import_module(symbol.module)
        for part in symbol.name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return "is gone"
    if symbol.parameters:
        # A wrapper of ours stands for the function it wraps.
        present = inspect.signature(inspect.unwrap(found)).parameters  # type: ignore[arg-type]
        lacking = [name for name in symbol.parameters if name not in present]
        if lacking:
            return f"takes no {', '.join(lacking)} any more"
    return None


@cache
def check() -> None:
    """Check every symbol once a process.

    Raises:
        H3QuantError: the first symbol that moved, with the installed and the supported version.
    """
    for symbol in SYMBOLS:
        wrong = problem(symbol)
        if wrong:
            raise H3QuantError(
                f"{symbol.path} {wrong} in {symbol.package} {version(symbol.package)}; vllm-h3-quant supports"
                f" {symbol.package} {SUPPORTED}.x: install '{symbol.package}=={SUPPORTED}.0' or update vllm-h3-quant"
            )
