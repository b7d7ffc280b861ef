"""Refuses to start when a symbol this package relies on has moved.

Each module of this folder lists its symbols with the parameters they are used with, and they are checked
before the first use: when a method of this package is asked for, never for other models.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
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


def problem(symbol: Symbol) -> str | None:
    """What is wrong with a symbol in this environment, or None.

    An error inside the module's own import is raised as it is: the symbol has not moved.
    """
    try:
        found = importlib.import_module(symbol.module)
    except ModuleNotFoundError as error:
        if error.name and symbol.module.startswith(error.name):
            return "is gone"
        return f"needs the module {error.name}, which is not installed"
    try:
        for part in symbol.name.split("."):
            found = getattr(found, part)
    except AttributeError:
        return "is gone"
    if symbol.parameters:
        # A wrapper of ours stands for the function it wraps.
        present = inspect.signature(inspect.unwrap(found)).parameters  # type: ignore[arg-type]
        lacking = [name for name in symbol.parameters if name not in present]
        if lacking:
            return f"takes no {', '.join(lacking)} any more"
    return None


def require(symbols: Iterable[Symbol]) -> None:
    """Check symbols before they are used.

    Raises:
        H3QuantError: the first one that moved, with the installed and the supported version.
    """
    for symbol in symbols:
        wrong = problem(symbol)
        if wrong:
            raise H3QuantError(
                f"{symbol.path} {wrong} in {symbol.package} {version(symbol.package)}; vllm-h3-quant supports"
                f" {symbol.package} {SUPPORTED}.x: install '{symbol.package}=={SUPPORTED}.0' or update vllm-h3-quant"
            )
