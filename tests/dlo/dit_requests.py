"""Requests to the DiT of a loaded pipeline, and the ways to hold its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from harness.denoise import Clip, denoise, denoise_inputs, lora_request, offload

LAYERWISE = {"enable_layerwise_offload": True}
RANK_LOCAL = {"enable_distributed_layerwise_offload": True, "dlo_use_allgather": False}
MODES: dict[str, dict[str, Any]] = {
    "layerwise": LAYERWISE,
    "rank-local": RANK_LOCAL,
    "one block stays": RANK_LOCAL | {"dlo_resident_layers": 1},
    "all blocks stay": RANK_LOCAL | {"dlo_resident_layers": 4},
    "public": {
        "diffusion_offload_config": {
            "mode": "layer",
            "components": ["dit"],
            "layer_options": {"dit": {"weight_transfer": "rank-local", "resident_layers": 1}},
        }
    },
}
CONFIGS: dict[str, dict[str, Any]] = {
    "h3_fp8": {"method": "h3_fp8"},
    "h3_int8": {"method": "h3_int8", "ignored_layers": ["blocks.1.mlp"]},
    "host": {"method": "h3_fp8", "adaln": "host"},
}

CLIP = Clip(64, 64, 39)
STEPS = 3

Load = Callable[..., Any]
Latents = tuple[torch.Tensor, torch.Tensor]


class Runs:
    """Requests to one pipeline.

    Attributes:
        before: the blocks' tensors before an offload took them.
        backend: the engine's offload, or None.
        expected: latents of the requests with seeds 0 and 1.
    """

    def __init__(self, pipeline: Any, device: torch.device, expected: Sequence[Any] = ()) -> None:
        self.pipeline, self.device, self.expected = pipeline, device, expected
        self.before = layouts(pipeline)
        self.backend = offload(pipeline, device)
        self._loras: Any = None

    def request(self, seed: int = 0, *, dit: Any = None, lora: tuple[Path, float] | None = None) -> Latents:
        """Latents of video and audio.

        Args:
            seed: of the noise and of the text's features.
            dit: another than the pipeline's own.
            lora: folder and scale of an adapter.
        """
        self._set_lora(lora)
        inputs = denoise_inputs(self.pipeline, CLIP, schedule=STEPS, seed=seed, lora=lora)
        with self.pipeline._resident_dit_layers_on_device():
            return denoise(self.pipeline, inputs, dit or self.pipeline.transformer, steps=STEPS, device=self.device)

    def _set_lora(self, lora: tuple[Path, float] | None) -> None:
        """What the engine's worker does before a request."""
        from vllm_omni.diffusion.lora import DiffusionLoRAManager

        if lora and self._loras is None:
            self._loras = DiffusionLoRAManager(self.pipeline, self.device, torch.bfloat16)
        if self._loras:
            self._loras.set_active_adapter(lora and lora_request(lora[0]), lora[1] if lora else 1.0)


def same(one: Any, other: Any) -> bool:
    return all(map(torch.equal, one, other))


Layout = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], bytes]


def layouts(pipeline: Any) -> dict[str, Layout]:
    """Dtype, shape, stride and bytes of every tensor in the DiT's blocks."""
    return {
        name: (tensor.dtype, tuple(tensor.shape), tensor.stride(), content(tensor))
        for name, tensor in tensors(pipeline.transformer.blocks)
    }


def tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def content(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
