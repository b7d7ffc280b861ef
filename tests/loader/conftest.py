"""A tiny transformer in every format, and files that a test makes or changes."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_h3_quant.loader.checkpoint import open_checkpoint
from vllm_h3_quant.loader.header import read_header
from vllm_h3_quant.loader.plan import Plan, plan_transformer
from vllm_h3_quant.loader.reader import close_files
from vllm_h3_quant.tiny_h3 import TinyH3, write_tiny_h3
from vllm_h3_quant.tiny_h3.formats import write_format

# 192 columns are one and a half blocks of 128; two heads make the order of qkv_proj's rows matter.
SPEC = TinyH3(layers=1, refiner_layers=1, encoder_layers=1, hidden=192, heads=2, ffn=128)

State = dict[str, torch.Tensor]


class Folder:
    """A transformer's folder that a test may change."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor, or else one of its module, or else the first."""
        module = name.rpartition(".")[0] + "."
        held = {file: set(read_header(file).entries) for file in sorted(self.path.glob("*.safetensors"))}
        exact = [file for file, names in held.items() if name in names]
        near = [file for file, names in held.items() if any(key.startswith(module) for key in names)]
        return [*exact, *near, *held][0]

    def change(self, name: str, edit: Callable[[State], None]) -> Path:
        """Apply ``edit`` to the tensors of the file that holds ``name``; the index follows. Returns the file."""
        file = self.file_of(name)
        tensors = load_file(file)
        before = set(tensors)
        edit(tensors)
        file.unlink()  # the tensors are mapped
        close_files()
        save_file({key: value.contiguous() for key, value in tensors.items()}, file, metadata={"format": "pt"})
        for index in self.path.glob("*.index.json"):
            content = json.loads(index.read_text())
            places = {key: value for key, value in content["weight_map"].items() if key not in before - set(tensors)}
            content["weight_map"] = places | dict.fromkeys(set(tensors) - before, file.name)
            index.write_text(json.dumps(content))
        return file

    def set(self, name: str, value: torch.Tensor) -> Path:
        """Replace one tensor."""
        return self.change(name, lambda tensors: tensors.update({name: value}))

    def plan(self) -> Plan:
        return plan_transformer(open_checkpoint(self.path))


@pytest.fixture(scope="session")
def native_h3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root that every format is made from."""
    return write_tiny_h3(tmp_path_factory.mktemp("formats") / "native", SPEC)


@pytest.fixture(scope="session")
def format_root(native_h3: Path) -> Callable[[str], Path]:
    """``format_root(name)``: the root in a format, written once; "native" is the source. Not to be changed."""

    def root(name: str) -> Path:
        found = native_h3.parent / name
        return found if found.exists() else write_format(native_h3, found, name)

    return root


@pytest.fixture(scope="session")
def format_folder(format_root: Callable[[str], Path]) -> Callable[[str], Path]:
    """``format_folder(name)``: its transformer's folder."""
    return lambda name: format_root(name) / "FL2VA" / "transformer"


@pytest.fixture
def own_folder(format_folder: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Folder]:
    """``own_folder(name)``: a copy of it that the test may change."""
    return lambda name: Folder(Path(shutil.copytree(format_folder(name), tmp_path / name)))


@pytest.fixture(autouse=True)
def _files_are_forgotten() -> Iterator[None]:
    """A file that a test writes anew under the same path must be opened anew."""
    yield
    close_files()


@pytest.fixture
def write_file(tmp_path: Path) -> Callable[..., Path]:
    """``write_file(header, data)``: a file with this header, text or anything that JSON can hold, and these bytes."""

    def write(header: object, data: bytes = b"", name: str = "bad.safetensors") -> Path:
        text = header.encode() if isinstance(header, str) else json.dumps(header).encode()
        file = tmp_path / name
        file.write_bytes(struct.pack("<Q", len(text)) + text + data)
        return file

    return write
