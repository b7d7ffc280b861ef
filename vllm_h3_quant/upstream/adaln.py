"""Lets MiniMax-H3's AdaLN projections run on weights in host memory, with outputs that are computed a schedule ahead.

Why: the engine asks an object for each projection's output, its cache, which holds what it has seen and computes the
rest on weights that are on the device. What a request's timesteps will be is known to the pipeline alone.
Symbols, vLLM-Omni 0.30.0, in ``vllm_omni.diffusion.models.minimax_h3``: ``MiniMaxH3AdalnProj`` of
``minimax_h3_transformer``, of which ``linear``, ``_cache_name``, ``expand_ratio``, ``modality_num`` and ``hidden_size``
are read and ``_adaln_cache`` is replaced, as is ``MiniMaxH3DiTModel.adaln_cache``; ``time_embedder(t)`` is called.
``MiniMaxH3Pipeline._prepare_encoder_conditioning_inputs(self, conditioning, sampling)`` is wrapped: what it returns
has ``task``, ``num_steps``, ``base_schedule``, ``video_shift``, ``audio_shift``, ``locked_audio_rows``,
``visual_condition`` and ``audio_condition``; ``_transformer_for_task(task)`` is called. Which timesteps those are
follows from ``minimax_h3_time_shift_sigmas`` of ``time_request``, ``MiniMaxH3DenoiseBranch.fill_timesteps`` and the
constants of ``denoise_loop``; ``timestep_plans`` of ``adaln_cache`` says the same but leaves out audio that is locked
and schedules of one step. Of a LoRA layer around a projection ``base_layer``, ``lora_a_stacked``, ``lora_b_stacked``
and ``_diffusion_lora_active_slices`` are read.
When they move: compare the calls of ``adaln_cache`` in ``minimax_h3_transformer.py`` and ``pipeline_minimax_h3.py``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import Module

from vllm_h3_quant.upstream.preflight import Symbol

_FOLDER = "vllm_omni.diffusion.models.minimax_h3"
_PREPARE = "_prepare_encoder_conditioning_inputs"
SYMBOLS = (
    Symbol("vllm-omni", f"{_FOLDER}.minimax_h3_transformer", "MiniMaxH3AdalnProj.forward", ("self", "t_emb")),
    Symbol("vllm-omni", f"{_FOLDER}.minimax_h3_transformer", "MiniMaxH3TimeEmbedder.forward", ("self", "t")),
    Symbol(
        "vllm-omni",
        f"{_FOLDER}.adaln_cache",
        "MiniMaxH3RuntimeAdalnCache.project",
        ("name", "module", "embedding", "compute"),
    ),
    Symbol(
        "vllm-omni",
        f"{_FOLDER}.time_request",
        "minimax_h3_time_shift_sigmas",
        ("num_steps", "shift_scale", "base_schedule"),
    ),
    Symbol("vllm-omni", f"{_FOLDER}.denoise_loop", "MINIMAX_H3_IMGVID_COND_TIMESTEP"),
    Symbol("vllm-omni", f"{_FOLDER}.denoise_loop", "MINIMAX_H3_AUDIO_REF_COND_TIMESTEP"),
    Symbol("vllm-omni", f"{_FOLDER}.pipeline_minimax_h3", f"MiniMaxH3Pipeline.{_PREPARE}", ("self",)),
    Symbol("vllm-omni", f"{_FOLDER}.pipeline_minimax_h3", "MiniMaxH3Pipeline._transformer_for_task", ("self", "task")),
    Symbol(
        "vllm-omni",
        "vllm_omni.diffusion.lora.layers.base_linear",
        "DiffusionBaseLinearLayerWithLoRA.set_lora",
        ("index", "lora_a", "lora_b"),
    ),
)
_ORIGINAL = "_h3_quant_original"

Announce = Callable[[Any, object, Callable[[], list[Sequence[torch.Tensor]]]], None]


class AdalnProjection:
    """One AdaLN projection of a DiT.

    Args:
        module: the engine's ``MiniMaxH3AdalnProj``.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self.width: int = module.expand_ratio * module.hidden_size * module.modality_num

    @property
    def linear(self) -> Any:
        """The linear itself, inside of what wraps it."""
        linear = self.module.linear
        return getattr(linear, "base_layer", linear)

    @property
    def weight(self) -> torch.Tensor:
        """``(N, K)`` of this rank."""
        weight: torch.Tensor = self.linear.weight
        return weight

    @property
    def state(self) -> object:
        """Of the adapter around the linear: which one, whether it is on, and how often it was written."""
        linear = self.module.linear
        if linear is self.linear:
            return id(linear)
        # Read so that a name which has moved is an error: an adapter would change and its outputs would not.
        return (
            id(linear),
            linear._diffusion_lora_active_slices,
            [
                (tensor.data_ptr(), None if tensor.is_inference() else tensor._version)
                for tensor in (*linear.lora_a_stacked, *linear.lora_b_stacked)
            ],
        )

    def run(self, embedding: torch.Tensor, weight: torch.Tensor) -> None:
        """Call the projection with ``weight`` on the device in place of its own."""
        with self.linear.quant_method.arrived(weight):
            self.module(embedding)


def projections(transformer: Module) -> dict[str, AdalnProjection]:
    """A DiT's AdaLN projections by the name that they ask for their output with, in the order in which they run."""
    from vllm_omni.diffusion.models.minimax_h3.minimax_h3_transformer import MiniMaxH3AdalnProj

    found = [module for module in transformer.modules() if isinstance(module, MiniMaxH3AdalnProj)]
    return {module._cache_name: AdalnProjection(module) for module in found}


def transformers(pipeline: Module) -> dict[str, Any]:
    """The DiTs of a pipeline by their name in it."""
    from vllm_omni.diffusion.models.minimax_h3.minimax_h3_transformer import MiniMaxH3DiTModel

    return {name: module for name, module in pipeline.named_modules() if isinstance(module, MiniMaxH3DiTModel)}


def embedder(transformer: Any, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """``(M,)`` timesteps to ``(M, E)`` embeddings, as the DiT's forward makes them."""

    def embed(timesteps: torch.Tensor) -> torch.Tensor:
        embedding: torch.Tensor = transformer.time_embedder(timesteps.to(device))
        return embedding

    return embed


def replace_cache(transformer: Any, cache: Any) -> None:
    """Have a DiT ask ``cache`` for the outputs of its projections."""
    transformer.adaln_cache = cache
    for projection in projections(transformer).values():
        projection.module._adaln_cache = cache


def announce_schedules(announce: Announce) -> None:
    """Call ``announce(DiT, identity, plans)`` before each request's first step.

    ``plans()`` gives, for each kind of request, the distinct timesteps of its steps, and first those of the kind that
    this request is of when it starts: the windows of a long clip may differ. A second call replaces the first.
    """
    from vllm_omni.diffusion.models.minimax_h3.pipeline_minimax_h3 import MiniMaxH3Pipeline

    current = getattr(MiniMaxH3Pipeline, _PREPARE)
    original = getattr(current, _ORIGINAL, current)

    @functools.wraps(original)
    def prepare(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        context: dict[str, Any] = original(self, *args, **kwargs)
        schedule, conditions = _schedule(context), _conditions(context)
        plans = functools.partial(_plans, schedule, conditions)
        announce(self._transformer_for_task(context["task"]), (schedule, conditions), plans)
        return context

    setattr(prepare, _ORIGINAL, original)
    setattr(MiniMaxH3Pipeline, _PREPARE, prepare)


Schedule = tuple[int, tuple[float, ...] | None, float, float]
Conditions = tuple[bool, bool, bool]
"""Whether audio is locked to a source, and whether frames and sounds condition the clip."""


def _conditions(context: dict[str, Any]) -> Conditions:
    return (
        context["locked_audio_rows"] is not None,
        context["visual_condition"] is not None,
        context["audio_condition"] is not None,
    )


def _schedule(context: dict[str, Any]) -> Schedule:
    base = context["base_schedule"]
    return (
        context["num_steps"],
        None if base is None else tuple(float(value) for value in base),
        context["video_shift"],
        context["audio_shift"],
    )


def _plans(schedule: Schedule, likely: Conditions) -> list[Sequence[torch.Tensor]]:
    """For each kind of request the distinct timesteps of its steps, the likely kind first.

    Text and padding have the video's; audio its own, or that of clean audio where it is locked to a source; frames
    and sounds that condition the clip at least a constant each.
    """
    from vllm_omni.diffusion.models.minimax_h3 import denoise_loop
    from vllm_omni.diffusion.models.minimax_h3.time_request import minimax_h3_time_shift_sigmas

    steps, base, *shifts = schedule
    video, audio = (
        [1.0 - sigma for sigma in minimax_h3_time_shift_sigmas(num_steps=steps, shift_scale=shift, base_schedule=base)]
        for shift in shifts
    )
    frames = [max(t, denoise_loop.MINIMAX_H3_IMGVID_COND_TIMESTEP) for t in video]
    sounds = [max(t, denoise_loop.MINIMAX_H3_AUDIO_REF_COND_TIMESTEP) for t in audio]
    locked = [1.0] * len(audio)
    kinds = sorted(itertools.product((False, True), repeat=3), key=lambda kind: kind != likely)
    rows = [
        [video, locked if is_locked else audio, *[frames] * has_frames, *[sounds] * has_sounds]
        for is_locked, has_frames, has_sounds in kinds
    ]
    # The last sigma is where the last step leads to, and no step begins there.
    return [
        [torch.tensor(step, dtype=torch.float32).unique(sorted=True) for step in list(zip(*kind, strict=True))[:-1]]
        for kind in rows
    ]
