"""Steps of a DiT as in a request, with random features in place of a text encoder's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

CANVAS = (1344, 768)
STEP = 32
"""Pixels of which the sides of a canvas are multiples; a video token is a square of them."""

TEXT = 64
SHORTEST, LONGEST = 39, 362
"""Frames: the number of the engine's next to one second, and the most that it serves."""


@dataclass(frozen=True)
class Clip:
    """What is asked for: sides in pixels, and frames."""

    width: int
    height: int
    frames: int

    @property
    def latent_t(self) -> int:
        return int(_planner().video_latent_t(self.frames))

    @property
    def audio_t(self) -> int:
        from vllm_omni.diffusion.models.minimax_h3.pipeline_minimax_h3 import MINIMAX_H3_FPS

        return int(_planner().audio_latent_t(self.frames / MINIMAX_H3_FPS))

    @property
    def tokens(self) -> int:
        """Of text, two channels of audio, video, and what fills the last group."""
        from vllm_omni.diffusion.models.minimax_h3.packed_sequence import MINIMAX_H3_SEQ_ALIGN

        used = TEXT + 2 * self.audio_t + self.latent_t * (self.width // STEP) * (self.height // STEP)
        return int(-(-used // MINIMAX_H3_SEQ_ALIGN) * MINIMAX_H3_SEQ_ALIGN)


def largest_clip(tokens: int) -> Clip:
    """The longest clip of at most ``tokens``, on the largest canvas on which it has a second.

    Canvases are 1344x768 and its integer fractions.

    Raises:
        ValueError: the smallest clip has more tokens.
    """
    canvases = ([side // part // STEP * STEP for side in CANVAS] for part in range(1, CANVAS[0] // STEP + 1))
    for width, height in takewhile(all, canvases):
        if Clip(width, height, SHORTEST).tokens <= tokens:
            lengths = range(SHORTEST, LONGEST + 1, 17)
            clips = [Clip(width, height, frames) for frames in lengths]
            return [clip for clip in clips if clip.tokens <= tokens][-1]
    raise ValueError(f"no clip has as few as {tokens} tokens; ask for {Clip(STEP, STEP, SHORTEST).tokens} or more")


def conditioning(clip: Clip, seed: int) -> Any:
    """What the engine's encoders would hand to its denoising: text features of deviation one, and the shape."""
    from vllm_omni.model_executor.models.minimax_h3.conditioning import (
        MINIMAX_H3_TEXT_HIDDEN_SIZE,
        MiniMaxH3EncoderConditioning,
    )

    features = torch.randn(TEXT, MINIMAX_H3_TEXT_HIDDEN_SIZE, generator=torch.Generator().manual_seed(seed))
    return MiniMaxH3EncoderConditioning(
        hidden_states=features.bfloat16(),
        token_tags=torch.ones(TEXT, dtype=torch.long),
        task="t2va",
        height=clip.height,
        width=clip.width,
        num_frames=clip.frames,
        latent_t=clip.latent_t,
        audio_t=clip.audio_t,
    )


def lora_request(folder: Path) -> Any:
    """A request's adapter, by the folder that it is in."""
    from vllm_omni.lora.request import LoRARequest
    from vllm_omni.lora.utils import stable_lora_int_id

    return LoRARequest("adapter", stable_lora_int_id(str(folder)), str(folder))


def denoise_inputs(
    pipeline: Any, clip: Clip, *, schedule: int, seed: int = 0, lora: tuple[Path, float] | None = None
) -> dict[str, Any]:
    """A request of ``schedule`` steps as the pipeline itself takes it, up to the first call of the DiT.

    Args:
        pipeline: a loaded one.
        clip: what is asked for.
        schedule: its steps.
        seed: of the noise and of the text's features.
        lora: folder and scale of the adapter that the request names; activating it is the worker's affair.

    Returns:
        Of ``MiniMaxH3Pipeline._build_denoise_inputs``: branch, rows and sigmas.
    """
    from vllm_omni.inputs.data import OmniDiffusionSamplingParams

    sampling = OmniDiffusionSamplingParams(num_inference_steps=schedule, seed=seed)
    if lora:
        sampling.lora_request, sampling.lora_scale = lora_request(lora[0]), lora[1]
    context = pipeline._prepare_encoder_conditioning_inputs(conditioning(clip, seed), sampling)
    inputs: dict[str, Any] = pipeline._build_denoise_inputs(**pipeline._denoise_kwargs(context))
    return inputs


def denoise(
    pipeline: Any, inputs: dict[str, Any], dit: Callable[..., Any], *, steps: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents of video and audio after some steps, by the engine's own loop and in the context of its runner.

    Args:
        pipeline: what ``inputs`` are of.
        inputs: of :func:`denoise_inputs`.
        dit: called for each step as the pipeline's DiT is.
        steps: how many of the schedule.
        device: of the pipeline.
    """
    from vllm_omni.diffusion.models.minimax_h3.denoise_loop import minimax_h3_denoise_loop

    sigmas = slice(steps + 1)
    with in_runner(pipeline, device):
        found = minimax_h3_denoise_loop(
            model=dit,
            positive=inputs["branch"],
            initial_video_rows=inputs["video_rows"],
            initial_audio_rows=inputs["audio_rows"],
            keyframe_cond_rows=inputs["cond_anchor"],
            audio_ref_rows=inputs["audio_anchor"],
            sigmas_video=inputs["sigmas_video"][sigmas],
            sigmas_audio=inputs["sigmas_audio"][sigmas],
            device=device,
        )
    video, audio = found
    return video, audio


@contextmanager
def in_runner(pipeline: Any, device: torch.device) -> Iterator[None]:
    """What the engine's runner has around a request."""
    from vllm_omni.diffusion.forward_context import set_forward_context
    from vllm_omni.diffusion.vllm_config import create_diffusion_vllm_config
    from vllm_omni.platforms import current_omni_platform

    config = create_diffusion_vllm_config(device, pipeline.od_config)
    config.kernel_config.ir_op_priority = current_omni_platform.get_default_ir_op_priority(config)
    with (
        set_forward_context(vllm_config=config, omni_diffusion_config=pipeline.od_config),
        torch.inference_mode(),
    ):
        yield


def offload(pipeline: Any, device: torch.device) -> Any:
    """Enable the offload that a pipeline was configured with, as the engine's runner does; its backend."""
    from vllm_omni.diffusion.offloader import enable_offload_backend

    return enable_offload_backend(pipeline.od_config, pipeline, device=device)[1]


def _planner() -> Any:
    from vllm_omni.diffusion.models.minimax_h3.time_request import MINIMAX_H3_SHAPE_PLANNER

    return MINIMAX_H3_SHAPE_PLANNER
