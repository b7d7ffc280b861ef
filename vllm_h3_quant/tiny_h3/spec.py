"""What may be chosen about a tiny MiniMax-H3, and what upstream fixes."""

from __future__ import annotations

from dataclasses import dataclass

# vllm_omni/diffusion/models/minimax_h3 fixes these, whatever config.json says.
TEXT_DIM = 5120
VIDEO_LATENT_CHANNELS = 24
AUDIO_LATENT_CHANNELS = 32
AUDIO_SAMPLE_RATE = 32000
AUDIO_SAMPLES_PER_LATENT = 800
VIDEO_PIXELS_PER_LATENT = 16
HEAD_DIM = 128

# Two ranks must still hold whole multiples of 16 of every quantized dimension.
_DIM_STEP = 32


@dataclass(frozen=True)
class TinyH3:
    """Sizes of a tiny MiniMax-H3. The number of linears that a method can quantize follows from them.

    The transformer has ``5 * layers + 4 * refiner_layers + 2`` of them (25 by default), the text decoder
    ``4 * encoder_layers`` (8).

    Attributes:
        layers: DiT blocks.
        refiner_layers: token-refiner blocks.
        hidden: model width of the DiT; a multiple of 32.
        heads: attention heads of 128 channels each; even.
        ffn: inner width of the SwiGLU MLP; a multiple of 32.
        encoder_layers: decoder layers of the text encoder.
        shards: safetensors files of the transformer and of the text encoder.
        seed: the only source of randomness.

    Raises:
        ValueError: a size that the engine, or tensor parallelism over two ranks, cannot take.
    """

    layers: int = 3
    refiner_layers: int = 2
    hidden: int = 192
    heads: int = 2
    ffn: int = 512
    encoder_layers: int = 2
    shards: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "refiner_layers", "hidden", "heads", "ffn", "encoder_layers", "shards"):
            if getattr(self, name) < 1:
                raise ValueError(f"TinyH3.{name} must be at least 1, got {getattr(self, name)}")
        for name, step in (("hidden", _DIM_STEP), ("ffn", _DIM_STEP), ("heads", 2)):
            value = getattr(self, name)
            if value % step:
                nearest = max(step, round(value / step) * step)
                raise ValueError(f"TinyH3.{name} must be a multiple of {step}, got {value}; nearest: {nearest}")
