"""Converts the transformer of a tiny MiniMax-H3 and writes a model root around it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from vllm_h3_quant.tiny_h3.formats import codes
from vllm_h3_quant.tiny_h3.formats.curve import RANK, prune
from vllm_h3_quant.tiny_h3.formats.order import Order, model_rows, module_name, pieces
from vllm_h3_quant.tiny_h3.tensors import save_sharded

State = dict[str, torch.Tensor]

_PREFIX = "model.diffusion_model."
_WEIGHTS = "diffusion_pytorch_model"
_STAMP = "tiny_h3.json"
"""By which ``write_tiny_h3`` knows a root as its own."""
_MODELOPT = {"quant_method": "modelopt", "producer": {"name": "modelopt", "version": "0.39.0"}}


@dataclass(frozen=True)
class _Format:
    """What a format changes.

    Attributes:
        order: its names and rows.
        encode: how linears are coded.
        prefix: what stands before every name.
        config: further keys of ``FL2VA/transformer/config.json``.
        root_config: further keys of ``transformer/config.json``, which the engine reads, too.
        kept: native linears that stay as they are, by a part of their names.
        change: of the native tensors beforehand.
        shards: files.
    """

    order: Order = Order.COMFY
    encode: codes.Encode = codes.plain
    prefix: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    root_config: dict[str, Any] = field(default_factory=dict)
    kept: tuple[str, ...] = ()
    change: Callable[[State], State] = dict
    shards: int = 2


def _comfy(encode: codes.Encode) -> _Format:
    return _Format(encode=encode, prefix=_PREFIX, shards=1)


def _modelopt(order: Order, algorithm: str, encode: codes.Encode, *kept: str) -> _Format:
    stated = _MODELOPT | {"quant_algo": algorithm, "ignore": [f"*{part}*" for part in kept]}
    return _Format(order, codes.modelopt(encode), config={"quantization_config": stated}, kept=kept)


def _curve(change: Callable[[State], State]) -> _Format:
    width = {"time_embed_dim": RANK}
    return _Format(prefix=_PREFIX, config=width, root_config=width, change=change, shards=1)


_BY_NAME = {
    "diffusers_bf16": _Format(Order.DIFFUSERS),
    "comfy_bf16": _comfy(codes.plain),
    "comfy_fp8": _comfy(codes.comfy_fp8),
    "comfy_int8_convrot": _comfy(codes.int8_convrot),
    "modelopt_fp8_tensor": _modelopt(Order.DIFFUSERS, "FP8", codes.fp8_tensor),
    "modelopt_fp8_channel": _modelopt(Order.DIFFUSERS, "FP8", codes.fp8_channel),
    "modelopt_fp8_native": _modelopt(Order.NATIVE, "FP8", codes.fp8_channel, "adaln_proj", "token_refiner"),
    "modelopt_nvfp4": _modelopt(Order.DIFFUSERS, "NVFP4", codes.nvfp4),
    "fp8_block_native": _modelopt(Order.NATIVE, "FP8", codes.fp8_block),
    "pruned_curve": _curve(prune),
    "pruned_curve_broken": _curve(lambda state: prune(state, broken=True)),
}

FORMATS = tuple(_BY_NAME)
"""Names that :func:`write_format` takes."""


@dataclass(frozen=True)
class _Converted:
    tensors: State
    values: State


def write_format(source: Path, target: Path, name: str) -> Path:
    """Write ``target``, a model root with the weights of ``source`` in the format ``name``, and return it.

    Everything but ``FL2VA/transformer`` and the configurations is linked, or copied to another file system.

    Args:
        source: a root that ``write_tiny_h3`` wrote.
        target: a path that is free.
        name: one of :data:`FORMATS`.

    Raises:
        KeyError: an unknown name.
        FileExistsError: ``target`` exists.
    """
    form = _BY_NAME[name]
    weights = source / "FL2VA" / "transformer"

    def left_out(folder: str, names: list[str]) -> list[str]:
        return [name for name in names if name == _STAMP or (Path(folder) == weights and name.startswith(_WEIGHTS))]

    shutil.copytree(source, target, copy_function=_link, ignore=left_out)
    folder = target / "FL2VA" / "transformer"
    save_sharded(_convert(_native(source), _heads(source), form).tensors, folder, _WEIGHTS, form.shards)
    _add_keys(folder / "config.json", form.config)
    _add_keys(target / "transformer" / "config.json", form.root_config)
    return target


def stored_values(source: Path, name: str) -> State:
    """What the file of :func:`write_format` stands for: every linear's ``(N, K)`` weight by the model's module name.

    In fp64, with rows in the model's order: q of all heads, then k, then v; gate, then up. A reader in fp32 gives the
    same numbers rounded once where a code has one scale, twice for NVFP4, and within fp32 sums for ConvRot. Linears
    that stay fp32 in every format are left out.
    """
    return _convert(_native(source), _heads(source), _BY_NAME[name]).values


def _convert(native: State, heads: int, form: _Format) -> _Converted:
    tensors: State = {}
    values: State = {}
    for name, tensor in form.change(native).items():
        module, _, leaf = name.rpartition(".")
        if leaf == "weight" and tensor.ndim == 2 and tensor.dtype is torch.bfloat16:
            encode = codes.plain if any(part in module for part in form.kept) else form.encode
            whole = torch.empty(tensor.shape, dtype=torch.float64)
            for stored, rows in pieces(form.order, module, len(tensor), heads):
                coded = encode(tensor[rows])
                tensors |= {f"{stored}.{kind}": found for kind, found in coded.tensors.items()}
                whole[rows] = coded.values
            values[module] = whole[model_rows(module, len(tensor), heads)]
        elif form.order is not Order.DIFFUSERS:
            tensors[name] = tensor
        elif module != "rope":  # Diffusers computes it
            tensors[f"{module_name(form.order, module)}.{leaf}"] = tensor
    return _Converted({form.prefix + name: tensor for name, tensor in tensors.items()}, values)


def _native(source: Path) -> State:
    state: State = {}
    for file in sorted((source / "FL2VA" / "transformer").glob("*.safetensors")):
        state |= load_file(file)
    return state


def _heads(source: Path) -> int:
    config = json.loads((source / "FL2VA" / "transformer" / "config.json").read_text())
    return int(config["num_attention_heads"])


def _add_keys(file: Path, keys: dict[str, Any]) -> None:
    """Replace a configuration that may be a link to the source's."""
    if keys:
        content = json.loads(file.read_text()) | keys
        file.unlink()
        file.write_text(json.dumps(content, indent=1))


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
