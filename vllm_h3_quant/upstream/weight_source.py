"""Puts this package's reader of checkpoints in the place of the engine's, where a component is quantized by it.

Why: the engine's iterator yields whatever a file holds under the file's names. It knows no scales beside a weight,
warns about tensors that the model lacks and drops them, and leaves rows of scales where they were when it reorders
those of a weight.
Symbols: ``DiffusersPipelineLoader._get_weights_iterator(self, source, model)`` and ``._prepare_weights(self,
model_name_or_path, subfolder, revision, fall_back_to_pt, allow_patterns_overrides)`` in
``vllm_omni.diffusion.model_loader.diffusers_loader``, and ``MINIMAX_H3_QWEN3VL_SELECTED_LM_LAYER`` in
``vllm_omni.diffusion.models.minimax_h3.encoder``, vLLM-Omni 0.30.0; ``counter_before_loading_weights`` and
``load_config`` of the loader and the attributes of a source are read. When they move: check that every tensor of a
source still comes out of the iterator, with the source's prefix, and how many decoder layers are read.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module

from vllm_h3_quant.upstream.preflight import Symbol

_LOADER = "vllm_omni.diffusion.model_loader.diffusers_loader"
_ENCODER = "vllm_omni.diffusion.models.minimax_h3.encoder"
SYMBOLS = (
    Symbol("vllm-omni", _LOADER, "DiffusersPipelineLoader._get_weights_iterator", ("self", "source", "model")),
    Symbol(
        "vllm-omni",
        _LOADER,
        "DiffusersPipelineLoader._prepare_weights",
        ("model_name_or_path", "subfolder", "revision", "fall_back_to_pt", "allow_patterns_overrides"),
    ),
    Symbol("vllm-omni", _ENCODER, "MINIMAX_H3_QWEN3VL_SELECTED_LM_LAYER"),
)

Weights = Iterator[tuple[str, torch.Tensor]]
Claim = Callable[[Any, str], Weights | None]
_ORIGINAL = "_h3_quant_original"


def install(claim: Claim) -> None:
    """Ask ``claim(loader, component)`` for each source's tensors; None leaves them to the engine.

    A second call replaces the first.
    """
    from vllm_omni.diffusion.model_loader.diffusers_loader import DiffusersPipelineLoader

    current = DiffusersPipelineLoader._get_weights_iterator
    original = getattr(current, _ORIGINAL, current)

    @functools.wraps(original)
    def get_weights_iterator(self: Any, source: Any, model: Module | None = None) -> Weights:
        found = claim(self, source.prefix.rstrip("."))
        if found is None:
            return original(self, source, model)
        if self.counter_before_loading_weights == 0.0:
            self.counter_before_loading_weights = time.perf_counter()
        return ((source.prefix + name, tensor) for name, tensor in found)

    setattr(get_weights_iterator, _ORIGINAL, original)
    DiffusersPipelineLoader._get_weights_iterator = get_weights_iterator


def sources(model: Module) -> dict[str, Any]:
    """The sources of a pipeline's weights by component."""
    return {source.prefix.rstrip("."): source for source in getattr(model, "weights_sources", ())}


def folder_of(loader: Any, source: Any) -> Path:
    """The local folder with a source's files, which are downloaded if the source is a repository of the hub."""
    root = Path(source.model_or_path)
    if root.is_dir():
        return root / (source.subfolder or "")
    folder, _, _ = loader._prepare_weights(
        source.model_or_path,
        source.subfolder,
        source.revision,
        source.fall_back_to_pt,
        source.allow_patterns_overrides,
    )
    return Path(folder)


def encoder_layers() -> int:
    """How many of the text decoder's layers the engine reads."""
    from vllm_omni.diffusion.models.minimax_h3.encoder import MINIMAX_H3_QWEN3VL_SELECTED_LM_LAYER

    return int(MINIMAX_H3_QWEN3VL_SELECTED_LM_LAYER)


def shows_progress(loader: Any) -> bool:
    """Whether this rank shows a bar while it loads."""
    from vllm.model_executor.model_loader.weight_utils import enable_tqdm

    return bool(enable_tqdm(loader.load_config.use_tqdm_on_load))


def fuses_adapter(pipeline: Module) -> bool:
    """Whether the pipeline adds an adapter to the tensors of the checkpoint as they are read (FastH3's)."""
    return getattr(pipeline, "_fasth3", None) is not None


def expects_diffusers_names(transformer: Module) -> bool:
    """Whether a DiT takes Diffusers names (FastVideo's modular releases)."""
    return bool(getattr(transformer, "_diffusers_weights", False))
