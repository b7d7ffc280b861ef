"""A model root with a DiT of MiniMax-H3's own size and random weights, beside the tiny model's other components.

    python benchmarks/synthetic_h3.py ROOT --layers 24

61 GiB at 50 layers, 1.2 GiB a layer. One random block is drawn, and every tensor is a stretch of it at a place of its
own, scaled to unit gain: drawing each number would take longer than writing it. The block's length is prime, so that
no two rows of a weight begin at the same place of it.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Annotated

import torch
import typer

from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.loader.architecture import ROPE, Architecture
from vllm_h3_quant.loader.checkpoint import read_json
from vllm_h3_quant.loader.shards import TensorSpec, header_bytes
from vllm_h3_quant.loader.stream import rope_frequencies
from vllm_h3_quant.tiny_h3 import TinyH3, write_tiny_h3
from vllm_h3_quant.tiny_h3.transformer import transformer_config

H3 = Architecture()
TINY = Architecture.from_config(transformer_config(TinyH3()), where="the tiny model")

BLOCK = 2**25 - 39
"""Numbers of the random block: the largest prime below 2^25, 64 MiB in bf16."""

_STAMP = "synthetic_h3.json"
_STEM = "diffusion_pytorch_model"
_REST = "rest"
_WRITE = 16 * 2**20
_BIAS_STD, _ADALN_BIAS_STD = 0.02, 0.5
_NORM_MEAN, _NORM_STD = 1.0, 0.02


def write_synthetic_h3(
    root: Path,
    *,
    layers: int | None = None,
    architecture: Architecture = H3,
    seed: int = 0,
    block: int = BLOCK,
    threads: int = 8,
) -> Path:
    """Write a model that the engine loads at ``root`` and return ``root``; one that is already there is kept.

    The DiT is a native checkpoint with every tensor that MiniMax's release has: bf16, fp32 where the engine requires
    it, a safetensors file for each block and one for the rest. Weights have the standard deviation ``K ** -0.5``, norms
    lie around one, no number is zero. In memory are ``block`` numbers once for each width of the large weights, and a
    smaller tensor for each thread. The files are written into a sibling folder that is then renamed.

    Args:
        root: folder of the model; its parent is created.
        layers: DiT blocks; the architecture's own number when None.
        architecture: sizes of the DiT; ``text_dim`` must be the tiny text encoder's, 5120.
        seed: of all weights; the same arguments give the same bytes, whatever ``threads`` is.
        block: numbers of the random block; a prime.
        threads: files that are written at a time.

    Raises:
        H3QuantError: ``root`` holds something else, or the disk has too little room.
    """
    if layers is not None:
        architecture = replace(architecture, num_layers=layers)
    stamp = json.loads(json.dumps({"architecture": asdict(architecture), "seed": seed, "block": block}))
    if root.exists():
        if (root / _STAMP).is_file() and read_json(root / _STAMP) == stamp:
            return root
        raise H3QuantError(f"{root} exists and is no synthetic model of these sizes and seed; give a path that is free")
    files = _files(architecture)
    root.parent.mkdir(parents=True, exist_ok=True)
    nbytes, free = sum(spec.nbytes for specs in files.values() for spec in specs), shutil.disk_usage(root.parent).free
    if nbytes > free:
        raise H3QuantError(
            f"{root.parent} has {free / 2**30:.1f} GiB left and the model of {architecture.num_layers} layers takes"
            f" {nbytes / 2**30:.1f}; ask for fewer layers, or give another folder"
        )
    with tempfile.TemporaryDirectory(prefix=f".{root.name}-", dir=root.parent) as scratch:
        fresh = Path(scratch) / "fresh"
        folder = _without_transformer(fresh, seed, architecture)
        numbers = _Numbers(seed, block, [spec for specs in files.values() for spec in specs])
        with ThreadPoolExecutor(threads, thread_name_prefix="h3-quant-write") as pool:
            list(pool.map(lambda item: _write_file(folder / item[0], item[1], numbers, architecture), files.items()))
        weight_map = {spec.name: file for file, specs in files.items() for spec in specs}
        index = {"metadata": {"total_size": nbytes}, "weight_map": weight_map}
        (folder / f"{_STEM}.safetensors.index.json").write_text(json.dumps(index, indent=1))
        (fresh / _STAMP).write_text(json.dumps(stamp, indent=1))
        fresh.rename(root)
    return root


def _without_transformer(fresh: Path, seed: int, architecture: Architecture) -> Path:
    """The tiny model with the DiT's configuration and none of its weights; the folder for them."""
    write_tiny_h3(fresh, TinyH3(layers=1, refiner_layers=1, seed=seed))
    (fresh / "tiny_h3.json").unlink()  # it is no tiny model any more, and must not be kept as one
    folder = fresh / "FL2VA" / "transformer"
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    for config in (folder / "config.json", fresh / "transformer" / "config.json"):
        content = read_json(config)
        content |= {key: value for key, value in asdict(architecture).items() if key in content}
        config.write_text(json.dumps(content, indent=1))
    return folder


def _files(architecture: Architecture) -> dict[str, list[TensorSpec]]:
    """The tensors of each file in the order of their bytes, which is safetensors' own: wide dtypes first, by name."""
    specs = [
        TensorSpec(name, torch.float32 if expected.fp32 else torch.bfloat16, expected.shape)
        for name, expected in architecture.tensors().items()
        if not expected.optional or name == ROPE
    ]
    specs.sort(key=lambda spec: (_part(spec.name), -spec.dtype.itemsize, spec.name))
    parts = [list(group) for _, group in groupby(specs, key=lambda spec: _part(spec.name))]
    return {f"{_STEM}-{i:05d}-of-{len(parts):05d}.safetensors": part for i, part in enumerate(parts, start=1)}


def _part(name: str) -> tuple[str, int]:
    """The block that a tensor belongs to."""
    stem, dot, rest = name.partition("blocks.")
    return (stem + dot, int(rest.split(".")[0])) if dot else (_REST, 0)


def _write_file(file: Path, specs: list[TensorSpec], numbers: _Numbers, architecture: Architecture) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        header = header_bytes(specs, {"format": "pt"})
        at = _put(descriptor, memoryview(header), 0)
        for spec in specs:
            for piece in [rope_frequencies(architecture)] if spec.name == ROPE else numbers.of(spec):
                at = _put(descriptor, memoryview(piece.view(torch.uint8).numpy().data), at)
    except OSError as error:
        raise H3QuantError(
            f"{file}: cannot be written: {error.strerror}; free the disk or ask for fewer layers"
        ) from error
    finally:
        os.close(descriptor)


def _put(descriptor: int, data: memoryview, at: int) -> int:
    """Write all of ``data`` at a position; the position behind it."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done : done + _WRITE], at + done)
    return at + done


class _Numbers:
    """Numbers of tensors, as stretches of one random block that begin at a place told by the tensor's name.

    Scaled blocks are made once for tensors that take a whole one; a smaller tensor scales what it takes.
    """

    def __init__(self, seed: int, block: int, specs: Iterable[TensorSpec]) -> None:
        normal = torch.randn(block, generator=torch.Generator().manual_seed(seed)).bfloat16()
        self._block = torch.where(normal == 0, 1.0, normal)
        large = {_law(spec) for spec in specs if math.prod(spec.shape) >= block}
        self._scaled: Mapping[_Law, torch.Tensor] = {law: _scale(self._block, law) for law in large}

    def of(self, spec: TensorSpec) -> Iterator[torch.Tensor]:
        """The tensor's numbers in order, flat and of its dtype."""
        law, left = _law(spec), math.prod(spec.shape)
        scaled = self._scaled.get(law)
        begin = zlib.crc32(spec.name.encode()) % len(self._block)
        while left:
            end = min(begin + left, len(self._block))
            yield _scale(self._block[begin:end], law) if scaled is None else scaled[begin:end]
            left -= end - begin
            begin = 0


_Law = tuple[float, float, torch.dtype]


def _law(spec: TensorSpec) -> _Law:
    """Mean, standard deviation and dtype of a tensor's numbers."""
    if "norm" in spec.name:
        return _NORM_MEAN, _NORM_STD, spec.dtype
    if spec.name.endswith(".bias"):
        return 0.0, _ADALN_BIAS_STD if "adaln_proj" in spec.name else _BIAS_STD, spec.dtype
    return 0.0, spec.shape[-1] ** -0.5, spec.dtype


def _scale(numbers: torch.Tensor, law: _Law) -> torch.Tensor:
    mean, std, dtype = law
    scaled = numbers.to(dtype) * std
    return scaled.add_(mean) if mean else scaled


def main(
    root: Annotated[Path, typer.Argument(help="Where the model is written.")],
    layers: Annotated[int, typer.Option(min=1, help="DiT blocks.")] = H3.num_layers,
    tiny: Annotated[bool, typer.Option(help="Blocks of the tiny model's size.")] = False,
    seed: Annotated[int, typer.Option(help="Of all weights.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="Files written at a time.")] = 8,
) -> None:
    """Write a MiniMax-H3 with random weights and a tiny text encoder."""
    start = time.perf_counter()
    try:
        write_synthetic_h3(root, layers=layers, architecture=TINY if tiny else H3, seed=seed, threads=threads)
    except H3QuantError as error:
        raise SystemExit(str(error)) from None
    seconds, nbytes = time.perf_counter() - start, sum(file.stat().st_size for file in _weights(root))
    typer.echo(f"{root}: {layers} layers, {nbytes / 2**30:.2f} GiB, {seconds:.1f} s")


def _weights(root: Path) -> list[Path]:
    return sorted(root.rglob("*.safetensors"))


if __name__ == "__main__":
    typer.run(main)
