"""What holds for every format's file, and that only the room of formats knows them by name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import vllm_h3_quant
from vllm_h3_quant.loader import formats
from vllm_h3_quant.loader.formats import FORMATS, beside, split

PACKAGE = Path(vllm_h3_quant.__file__).parent
ROOM = "vllm_h3_quant.loader.formats"
SHARED = {"base", "beside", "pruned"}
"""Files of the room that every other room may import."""


def imported(file: Path) -> Iterator[str]:
    """Modules, and what may be one, that a file imports."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names)


def test_no_room_imports_a_formats_file() -> None:
    """But for the export's, which the room that writes exports reads."""
    room = Path(formats.__file__).parent
    files = {file.stem for file in room.glob("*.py")} - {"__init__"}
    assert len(files) > len(SHARED)
    found = {
        (file.relative_to(PACKAGE).parts[0], stem)
        for file in PACKAGE.rglob("*.py")
        if room not in file.parents
        for stem in files - SHARED
        if any(module == f"{ROOM}.{stem}" for module in imported(file))
    }
    assert found == {("export", "export")}


def test_names_and_companions_have_one_meaning() -> None:
    """A name that two formats print would tell nothing; a companion is taken for the same thing in all of them."""
    names = [form.name for form in FORMATS]
    assert len(set(names)) == len(names)
    for form in FORMATS:
        for last, kind in {**beside.COMMON, **form.kinds}.items():
            assert split(f"module.{last}") == ("module", kind), form
    assert split("weight") == ("", "")
