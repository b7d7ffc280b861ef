"""The header of a safetensors file: what it says, and one error for each way in which it can be wrong."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.loader.header import DTYPES, read_header

Write = Callable[..., Path]


def tensor(dtype: object = "F32", shape: object = (2,), begin: object = 0, end: object = 8) -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape) if isinstance(shape, tuple) else shape, "data_offsets": [begin, end]}


def test_states_what_safetensors_wrote(tmp_path: Path) -> None:
    """Every dtype, a scalar, an empty tensor; the bytes are where ``start`` says."""
    tensors = {name: torch.arange(6).reshape(2, 3).to(dtype) for name, dtype in DTYPES.items()}
    tensors |= {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 4)}
    file = tmp_path / "all.safetensors"
    save_file(tensors, file, metadata={"format": "pt"})
    header = read_header(file)
    assert header.metadata == {"format": "pt"}
    assert header.entries.keys() == tensors.keys()
    content = file.read_bytes()
    for name, value in tensors.items():
        entry = header.entries[name]
        assert (entry.torch_dtype, entry.shape, entry.nbytes) == (value.dtype, tuple(value.shape), value.nbytes)
        if value.nbytes:
            raw = value.reshape(-1).view(torch.uint8).numpy().tobytes()
            assert content[entry.start : entry.start + entry.nbytes] == raw
    assert header.entries["F32"].row_nbytes == 3 * 4
    positions = [entry.start for entry in header.entries.values()]
    assert positions == sorted(positions)


BAD: dict[str, tuple[Any, bytes, str]] = {
    "no JSON": ("{nothing", b"", "the header is no JSON"),
    "deep JSON": ("[" * 100_000, b"", "the header is no JSON"),
    "a number of 5000 digits": ('{"w": ' + "9" * 5000 + "}", b"", "the header is no JSON"),
    "a list": ([], b"", "the header is list, not a mapping"),
    "twice": ('{"w": {}, "w": {}}', b"", "tensor 'w' is in the header twice"),
    "metadata of numbers": ({"__metadata__": {"a": 1}}, b"", "__metadata__ must map names to strings"),
    "metadata null": ({"__metadata__": None}, b"", "__metadata__ must map names to strings"),
    "no mapping": ({"w": 3}, b"", "tensor 'w' is described by int"),
    "no dtype": ({"w": {"shape": [2], "data_offsets": [0, 8]}}, bytes(8), "tensor 'w' has the unknown dtype None"),
    "unknown dtype": ({"w": tensor("F4")}, bytes(8), "tensor 'w' has the unknown dtype 'F4'; known: BOOL, U8"),
    "dtype of a list": ({"w": tensor([])}, bytes(8), "tensor 'w' has the unknown dtype []"),
    "negative shape": ({"w": tensor(shape=(-2,))}, bytes(8), "tensor 'w' has the shape [-2]"),
    "shape of booleans": ({"w": tensor(shape=[True])}, bytes(8), "tensor 'w' has the shape [True]"),
    "shape of 9": ({"w": tensor(shape=(1,) * 9)}, bytes(8), "not a list of at most 8 sizes"),
    "huge shape": ({"w": tensor(shape=(2**63,))}, bytes(8), "tensor 'w' has the shape [9223372036854775808]"),
    "one offset": ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0]}}, bytes(8), "not two positions"),
    "offsets of floats": ({"w": tensor(end=8.0)}, bytes(8), "tensor 'w' has data_offsets [0, 8.0]"),
    "bytes of another shape": ({"w": tensor(end=4)}, bytes(4), "tensor 'w' has 4 bytes, but F32 of shape [2] takes 8"),
    "backwards": ({"w": tensor(begin=8, end=0)}, bytes(8), "tensor 'w' has -8 bytes"),
    "gap": ({"w": tensor(), "x": tensor(begin=9, end=17)}, bytes(17), "tensor 'x' begins at byte"),
    "overlap": ({"w": tensor(), "x": tensor(begin=4, end=12)}, bytes(12), "tensor 'x' begins at byte"),
    "truncated": ({"w": tensor(), "x": tensor(begin=8, end=16)}, bytes(15), "truncated in tensor 'x'"),
    "too long": ({"w": tensor()}, bytes(9), "1 bytes follow the last tensor"),
}


@pytest.mark.parametrize("case", BAD)
def test_refuses(case: str, write_file: Write) -> None:
    header, data, message = BAD[case]
    file = write_file(header, data)
    with pytest.raises(H3QuantError) as caught:
        read_header(file)
    told = str(caught.value)
    assert told.startswith(str(file))
    assert message in told
    assert "\n" not in told


@pytest.mark.parametrize("content", [b"", b"1234567", struct.pack("<Q", 100) + b"{}", struct.pack("<Q", 2**63) + b"{}"])
def test_refuses_what_is_too_short(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "short.safetensors"
    file.write_bytes(content)
    with pytest.raises(H3QuantError, match=r"short\.safetensors: .*copy it again"):
        read_header(file)


@pytest.mark.parametrize("what", ["missing", "folder"])
def test_refuses_what_cannot_be_read(what: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(H3QuantError, match=f"{what}: cannot be read"):
        read_header(tmp_path / what)


def test_error_stays_one_line_for_any_name(write_file: Write) -> None:
    file = write_file({"a\nb": {"dtype": "F\n4", "shape": [2], "data_offsets": [0, 8]}}, bytes(8))
    with pytest.raises(H3QuantError) as caught:
        read_header(file)
    assert "\n" not in str(caught.value)
