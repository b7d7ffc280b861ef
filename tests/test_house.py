"""The arrows of docs/design.md: what each room imports, in one direction, and who touches private symbols."""

from __future__ import annotations

import ast
import graphlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

import vllm_h3_quant

PACKAGE = Path(vllm_h3_quant.__file__).parent
DESIGN = Path(__file__).parents[1] / "docs" / "design.md"

TORCHS_OWN = frozenset(
    {
        "_apply",  # torch.nn.Module: where every move and cast of a module passes
        "_forward_hooks",
        "_forward_pre_hooks",
        "_int_mm",  # torch's 8-bit products, which have no public name
        "_parameters",
        "_python_dispatch",  # torch.utils: TorchDispatchMode
        "_scaled_mm",
    }
)
COMFY_KITCHENS_OWN = frozenset({"_C"})
"""kernels/gemm_library.py says why; no symbol of the engine."""


def modules(package: Path = PACKAGE) -> dict[str, ast.Module]:
    """Syntax trees by dotted names relative to the package; a folder's ``__init__`` has the folder's."""
    found = {}
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = ast.parse(file.read_text())
    return found


def imports(trees: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    """For each module, those of the package that it imports anywhere: inside functions and for types too."""
    prefix = f"{PACKAGE.name}."
    found: dict[str, set[str]] = {name: set() for name in trees}
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(prefix):
                module = (node.module or "").removeprefix(PACKAGE.name).removeprefix(".")
                for alias in node.names:
                    inner = f"{module}.{alias.name}".removeprefix(".")
                    found[name].add(inner if inner in trees else module)
            elif isinstance(node, ast.Import):
                found[name] |= {a.name.removeprefix(prefix) for a in node.names if a.name.startswith(prefix)}
    return found


def room(module: str) -> str:
    return module.split(".", 1)[0]


def arrows(between: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Rooms that each room imports. The package's ``__init__``, which has only the version, is no room."""
    found: dict[str, set[str]] = defaultdict(set)
    for module, imported in between.items():
        if room(module):
            found[room(module)] |= {room(other) for other in imported} - {room(module), ""}
    return dict(found)


def table() -> dict[str, list[str]]:
    """Rooms of docs/design.md from the bottom up, and those that each may import."""
    rows = re.findall(r"^\| `([\w/.]+)` \|.*\| ([^|]*) \|$", DESIGN.read_text(), re.MULTILINE)
    return {
        _bare(name): [_bare(part.strip()) for part in told.split(",") if part.strip() != "-"] for name, told in rows
    }


def _bare(name: str) -> str:
    return name.strip("`").removesuffix("/").removesuffix(".py")


TREES = modules()
IMPORTS = imports(TREES)


def test_the_table_of_rooms_is_the_code() -> None:
    assert {name: set(told) for name, told in table().items()} == arrows(IMPORTS)


def test_a_room_imports_only_rooms_below_it() -> None:
    above: set[str] = set(table())
    for name, told in table().items():
        assert not above & set(told), f"{name} imports {sorted(above & set(told))} from above, or itself"
        above.discard(name)


@pytest.mark.parametrize("name", sorted(arrows(IMPORTS)))
def test_files_of_a_room_import_each_other_one_way(name: str) -> None:
    inside = {
        module: {o for o in others if room(o) == name} for module, others in IMPORTS.items() if room(module) == name
    }
    graphlib.TopologicalSorter(inside).prepare()


def private_symbols(trees: Mapping[str, ast.Module]) -> Iterator[tuple[str, str]]:
    """Module and name of every private symbol that the package does not define itself."""
    own = set().union(*map(_defined, trees.values()))
    for module, tree in trees.items():
        for node in ast.walk(tree):
            for name in _used(node):
                if name.startswith("_") and not name.endswith("__") and name not in own:
                    yield module, name


def _defined(tree: ast.Module) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is(node.value, "self"):
            found.add(node.attr)
    return found


def _used(node: ast.AST) -> Iterable[str]:
    if isinstance(node, ast.Attribute):
        # vLLM's operators are private where they hang on torch.
        return [f"{node.attr} of torch.ops" if _is(node.value, "ops") else node.attr]
    if isinstance(node, ast.ImportFrom):
        return [*(node.module or "").split("."), *(alias.name for alias in node.names)]
    if isinstance(node, ast.Import):
        return [part for alias in node.names for part in alias.name.split(".")]
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in {"getattr", "setattr", "hasattr"}
    ):
        return [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
    return []


def _is(node: ast.AST, name: str) -> bool:
    """Whether an expression ends in ``name``."""
    return name in (getattr(node, "id", None), getattr(node, "attr", None))


def test_only_upstream_touches_private_symbols_of_the_engine() -> None:
    allowed = TORCHS_OWN | COMFY_KITCHENS_OWN
    elsewhere = {
        (module, name) for module, name in private_symbols(TREES) if room(module) != "upstream" and name not in allowed
    }
    assert not elsewhere


def test_a_private_symbol_is_seen_however_it_is_reached() -> None:
    source = """
from vllm import _custom_ops
import a._b
x._c.d
getattr(x, "_e")
torch.ops._C.f
layer._g = 1
self._mine = 1
self._mine.h
"""
    found = {name for _, name in private_symbols({"m": ast.parse(source)})}
    assert found == {"_custom_ops", "_b", "_c", "_e", "_C of torch.ops", "_g"}


def test_the_root_holds_what_the_engine_reaches_first() -> None:
    assert {file.name for file in PACKAGE.glob("*.py")} == {"__init__.py", "errors.py", "log.py", "plugin.py"}
