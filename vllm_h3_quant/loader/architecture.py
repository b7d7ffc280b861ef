"""Every tensor that the DiT of MiniMax-H3 has, from its configuration: name, shape and whether fp32 is required."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import prod
from typing import Any

from vllm_h3_quant.errors import H3QuantError

_ALIASES = {
    "num_refiner_layers": "token_refiner_num_layers",
    "ffn_dim": "ffn_hidden_size",
    "in_channels": "latents_dim",
    "audio_in_channels": "audio_latents_dim",
    "freq_dim": "timestep_input_dim",
    "time_embed_hidden_dim": "time_embed_hidden_size",
    "rope_freq_dim": "rope_inv_freq_len",
}
"""A second spelling of the same sizes."""

ROPE = "rope.inv_freq"

_MOST_LAYERS = 1024
"""Every tensor of every layer is listed, so that a number without a limit would fill the memory."""


@dataclass(frozen=True)
class Expected:
    """A tensor that the model has.

    Attributes:
        shape: as a native checkpoint stores it.
        fp32: whether the engine requires fp32.
        optional: whether a checkpoint may leave it out.
    """

    shape: tuple[int, ...]
    fp32: bool = False
    optional: bool = False


@dataclass(frozen=True)
class Architecture:
    """Sizes of the DiT, by the keys of ``transformer/config.json``; the defaults are MiniMax-H3's."""

    num_layers: int = 50
    token_refiner_num_layers: int = 2
    hidden_size: int = 5376
    num_attention_heads: int = 56
    attention_head_dim: int = 128
    ffn_hidden_size: int = 14336
    latents_dim: int = 24
    audio_latents_dim: int = 32
    patch_size: tuple[int, int, int] = (1, 2, 2)
    text_dim: int = 5120
    timestep_input_dim: int = 256
    time_embed_hidden_size: int = 5376
    time_embed_dim: int = 2688
    adaln_out_features: int = 18 * 5376
    final_adaln_out_features: int = 2 * 5376
    rope_inv_freq_len: int = 16
    rope_theta: float = 10000.0

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, where: str) -> Architecture:
        """The sizes that ``config`` states, MiniMax-H3's for those that it does not.

        Raises:
            H3QuantError: a size that is no positive number, or more layers than any model has.
        """
        named = {_ALIASES.get(key, key): value for key, value in config.items()}
        values: dict[str, Any] = {}
        for field in fields(cls):
            if field.name not in named:
                continue
            value = named[field.name]
            patch = field.name == "patch_size"
            sizes = value if patch and isinstance(value, list | tuple) else [value]
            types = (int, float) if field.name == "rope_theta" else (int,)
            limit = _MOST_LAYERS if field.name.endswith("num_layers") else 2**31 - 1
            if len(sizes) != (3 if patch else 1) or not all(
                type(size) in types and 0 < size <= limit for size in sizes
            ):
                raise H3QuantError(f"{where}: {field.name}={value!r} is not valid; MiniMax-H3 has {field.default!r}")
            values[field.name] = tuple(sizes) if field.name == "patch_size" else value
        return cls(**values)

    def tensors(self, *, curve: bool = False) -> dict[str, Expected]:
        """By the native names; with a ``curve`` there is no time embedder, and the curve itself is not listed."""
        hidden, patch = self.hidden_size, self.latents_dim * prod(self.patch_size)
        found: dict[str, Expected] = {ROPE: Expected((self.rope_inv_freq_len,), fp32=True, optional=True)}
        found |= _linear("video_patch_proj", hidden, patch, fp32=True)
        found |= _linear("audio_patch_proj", hidden, self.audio_latents_dim, fp32=True)
        found |= _linear("condition_proj", hidden, self.text_dim)
        if not curve:
            found |= _linear("time_embedder.proj_in", self.time_embed_hidden_size, self.timestep_input_dim, fp32=True)
            found |= _linear("time_embedder.proj_out", self.time_embed_dim, self.time_embed_hidden_size, fp32=True)
        for index in range(self.token_refiner_num_layers):
            found |= self._block(f"token_refiner.blocks.{index}")
        found["token_refiner.final_norm.weight"] = Expected((hidden,))
        for index in range(self.num_layers):
            found |= self._block(f"blocks.{index}")
            found |= _linear(f"blocks.{index}.adaln_proj.linear", self.adaln_out_features, self.time_embed_dim)
            # FastVideo's sparse attention; the engine has the gate only where it serves such a release.
            gate = (self.num_attention_heads * self.attention_head_dim, hidden)
            found[f"blocks.{index}.attn.to_gate_compress.weight"] = Expected(gate, optional=True)
        found["final_layer.norm.weight"] = Expected((hidden,))
        found |= _linear("final_layer.adaln_proj.linear", self.final_adaln_out_features, self.time_embed_dim)
        found |= _linear("final_layer.video_out", patch, hidden, fp32=True)
        found |= _linear("final_layer.audio_out", self.audio_latents_dim, hidden, fp32=True)
        return found

    def _block(self, prefix: str) -> dict[str, Expected]:
        hidden, heads, head = self.hidden_size, self.num_attention_heads, self.attention_head_dim
        shapes = {
            "norm1.weight": (hidden,),
            "norm2.weight": (hidden,),
            "attn.q_norm.weight": (head,),
            "attn.k_norm.weight": (head,),
            "attn.qkv_proj.weight": (3 * heads * head, hidden),
            "attn.out_proj.weight": (hidden, heads * head),
            "mlp.fc1.weight": (2 * self.ffn_hidden_size, hidden),
            "mlp.fc2.weight": (hidden, self.ffn_hidden_size),
        }
        return {f"{prefix}.{name}": Expected(shape) for name, shape in shapes.items()}


def _linear(name: str, outputs: int, inputs: int, *, fp32: bool = False) -> dict[str, Expected]:
    return {f"{name}.weight": Expected((outputs, inputs), fp32), f"{name}.bias": Expected((outputs,), fp32)}
