"""Damaged checkpoints, 225 of them: each loads, or is refused by the package's own error in one line.

Mutations come from a seeded generator; ``VLLM_H3_QUANT_FUZZ`` asks for another number a format. A failure names its
seed: ``damage(folder, seed)`` makes the same files again.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.loader.checkpoint import open_checkpoint
from vllm_h3_quant.loader.plan import Plan, plan_text_encoder, plan_transformer
from vllm_h3_quant.loader.reader import close_files, mapped

MUTANTS = int(os.environ.get("VLLM_H3_QUANT_FUZZ", 25))
"""Damaged checkpoints a format."""
SUBJECTS = (
    "native",
    "diffusers_bf16",
    "comfy_fp8",
    "comfy_int8_convrot",
    "modelopt_fp8_channel",
    "modelopt_nvfp4",
    "fp8_block_native",
    "pruned_curve",
    "text_encoder",
)
JUNK: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 3, 4096, 2**31, 2**62, 2**63, 10**30, 1.5, 1e-40, float("nan"), float("inf")),
    *("", "F32", "I64", "weight", "a\nb", "\ud800", "\0", "..", "x" * 300, "9" * 5000),
    *([], [1, 2], [0, 2**61], [[]], {}, {"a": 1}, {"format": 1}),
)
SAME_SIZE = (("BF16", "F16", "I16"), ("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"), ("F32", "I32"), ("F64", "I64"))
LEAVES = ("weight", "bias", "weight_scale", "weight_scale_inv", "weight_scale_2", "input_scale", "comfy_quant")

Rng = random.Random


def read_parts(file: Path) -> tuple[dict[str, Any], bytes]:
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def replace(file: Path, content: bytes) -> None:
    """Write a file that may be a link to the original."""
    file.unlink()
    file.write_bytes(content)


def write_parts(file: Path, header: Any, data: bytes) -> None:
    text = json.dumps(header).encode()
    replace(file, struct.pack("<Q", len(text)) + text + data)


def shard(rng: Rng, folder: Path) -> Path:
    return rng.choice(sorted(folder.glob("*.safetensors")))


def flip(rng: Rng, content: bytes, low: int, high: int, count: int) -> bytes:
    changed = bytearray(content)
    for _ in range(count):
        changed[rng.randrange(low, high)] = rng.randrange(256)
    return bytes(changed)


def flip_header(rng: Rng, folder: Path) -> None:
    file = shard(rng, folder)
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    replace(file, flip(rng, content, 0 if rng.random() < 0.2 else 8, 8 + length, rng.choice((1, 1, 2, 8))))


def flip_data(rng: Rng, folder: Path) -> None:
    file = shard(rng, folder)
    header, data = read_parts(file)
    write_parts(file, header, flip(rng, data, 0, len(data), 64))


def cut_or_extend(rng: Rng, folder: Path) -> None:
    file = shard(rng, folder)
    content = file.read_bytes()
    at = rng.choice((0, 7, 8, 9, rng.randrange(len(content)), rng.randrange(min(len(content), 20_000)), -1))
    replace(file, content + b"\0" * rng.randrange(1, 64) if rng.random() < 0.2 else content[:at])


def edit_json(rng: Rng, value: Any) -> Any:
    """One random node replaced, removed, renamed or doubled."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.1:
        return rng.choice(JUNK)
    keys = list(value) if isinstance(value, dict) else range(len(value))
    key = rng.choice(keys)
    if isinstance(value[key], dict | list) and rng.random() < 0.8:
        value[key] = edit_json(rng, value[key])
    elif (what := rng.random()) < 0.5:
        value[key] = rng.choice(JUNK)
    elif what < 0.7:
        del value[key]
    elif what < 0.85:
        value[key] = value[rng.choice(keys)]
    elif isinstance(value, dict):
        value[str(rng.choice(("", "a\nb", "blocks.0.mlp.fc1.weight", f"{key}x", "weight", "9" * 5000)))] = value.pop(
            key
        )
    return value


def edit_header(rng: Rng, folder: Path) -> None:
    file = shard(rng, folder)
    header, data = read_parts(file)
    write_parts(file, edit_json(rng, header), data)


def edit_tensor(rng: Rng, folder: Path) -> None:
    """A header that still fits its bytes: another dtype or shape, two names exchanged, another last part."""
    file = shard(rng, folder)
    header, data = read_parts(file)
    names = [name for name in header if name != "__metadata__"]
    name, other = rng.choice(names), rng.choice(names)
    entry, what = header[name], rng.randrange(4)
    if what == 0:
        sizes = next((sizes for sizes in SAME_SIZE if entry["dtype"] in sizes), (entry["dtype"],))
        entry["dtype"] = rng.choice(sizes)
    elif what == 1:
        shape = entry["shape"]
        flat = [size for size in shape if size != 1]
        entry["shape"] = rng.choice((shape[::-1], [1, *shape], [*shape, 1], flat, [*shape[:-2], *flat[-2:]]))
    elif what == 2:
        header[name], header[other] = header[other], header[name]
    else:
        header[f"{name.rpartition('.')[0]}.{rng.choice(LEAVES)}"] = header.pop(name)
    write_parts(file, header, data)


def damage_beside(rng: Rng, folder: Path) -> None:
    """Bytes of a scale or a marker, or where there is none of any tensor."""
    file = shard(rng, folder)
    header, data = read_parts(file)
    names = [name for name in header if name != "__metadata__"]
    name = rng.choice([name for name in names if "scale" in name or "comfy" in name] or names)
    begin, end = header[name]["data_offsets"]
    if header[name]["dtype"] == "U8" and rng.random() < 0.8:
        stated = json.loads(data[begin:end]) if data[begin : begin + 1] == b"{" else {}
        text = json.dumps(edit_json(rng, stated)).encode()
        raw = text[: end - begin].ljust(end - begin)
    elif end - begin >= 4:
        value = rng.choice((float("nan"), float("inf"), -1.0, 0.0, 1e-45, 3e38, -0.0))
        at = rng.randrange((end - begin) // 4) * 4
        raw = data[begin : begin + at] + struct.pack("<f", value) + data[begin + at + 4 : end]
    else:
        raw = bytes(rng.randrange(256) for _ in range(end - begin))
    write_parts(file, header, data[:begin] + raw + data[end:])


def move_files(rng: Rng, folder: Path) -> None:
    file, other = shard(rng, folder), rng.choice(sorted(path for path in folder.iterdir() if path.is_file()))
    what = rng.randrange(5)
    if what == 0:
        file.unlink()
    elif what == 1:
        shutil.copy(file, folder / "again.safetensors")
    elif what == 2:
        file.rename(folder / "renamed.safetensors")
    elif what == 3:
        replace(file, other.read_bytes())
    else:
        file.unlink()
        file.mkdir()


def edit_file(name: str) -> Callable[[Rng, Path], None]:
    def edit(rng: Rng, folder: Path) -> None:
        file = next(folder.glob(name), None)
        if file is None:
            return edit_header(rng, folder)
        content = file.read_bytes()
        if rng.random() < 0.3:
            return replace(file, flip(rng, content, 0, len(content), 2))
        return replace(file, json.dumps(edit_json(rng, json.loads(content))).encode())

    return edit


MUTATIONS: tuple[Callable[[Rng, Path], None], ...] = (
    *(flip_header, flip_data, cut_or_extend, edit_header, edit_tensor, edit_tensor, damage_beside, damage_beside),
    *(move_files, edit_file("*.index.json"), edit_file("config.json")),
)


def damage(folder: Path, seed: str) -> None:
    rng = random.Random(seed)
    rng.choice(MUTATIONS)(rng, folder)


def use(place: Path, subject: str) -> Plan:
    """Open, plan, and read what there is."""
    checkpoint = open_checkpoint(place)
    plan = plan_text_encoder(checkpoint, 1) if subject == "text_encoder" else plan_transformer(checkpoint)
    for linear in list(plan.linears.values())[::3]:
        assert linear.values(0, linear.shape[0], torch.float32).shape == linear.shape
        assert linear.values(1, 1, torch.bfloat16).shape == (1, linear.shape[1])
    for entry in list(plan.plain.values())[::5]:
        mapped(entry)
    return plan


@pytest.fixture(scope="module")
def originals(native_h3: Path, format_folder: Callable[[str], Path]) -> Callable[[str], Path]:
    encoder = native_h3 / "FL2VA" / "text_encoder"
    return lambda subject: encoder if subject == "text_encoder" else format_folder(subject)


@pytest.mark.parametrize("subject", SUBJECTS)
def test_nothing_but_our_error(subject: str, originals: Callable[[str], Path], tmp_path: Path) -> None:
    outcomes: Counter[str] = Counter()
    for number in range(MUTANTS):
        seed = f"{subject} {number}"
        folder = tmp_path / str(number)
        shutil.copytree(originals(subject), folder, copy_function=os.link)
        damage(folder, seed)
        try:
            plan = use(folder, subject)
        except H3QuantError as error:
            told = [str(error)]
            outcomes["refused"] += 1
        except Exception as error:
            raise AssertionError(f"seed {seed!r}: {type(error).__name__}: {error}") from error
        else:
            told = plan.problems
            outcomes["problem" if told else "loads"] += 1
        assert all(line.isprintable() for line in told), f"seed {seed!r}: {told}"
        close_files()
        shutil.rmtree(folder)
    # Mutations that all do nothing, or all break the first byte, would test nothing.
    assert outcomes["loads"]
    assert outcomes["refused"] + outcomes["problem"] >= MUTANTS // 5
