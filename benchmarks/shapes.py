"""MiniMax-H3's shapes, from which every benchmark takes its sizes.

A linear of ``k`` inputs and ``n`` outputs on ``m`` tokens is ``(m, k) @ (k, n)``: ``2 m n k`` operations.
Attention of ``h`` heads of ``d`` over ``m`` tokens, not causal, is ``4 m^2 h d``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from vllm_h3_quant.kernels.hadamard import MAX_GROUP

TENSOR_PARALLEL = (1, 2, 4, 8)

TOKENS: dict[int, int] = {4: 32_704, 5: 38_592, 10: 73_728, 15: 109_952}
"""Packed tokens of a clip at 1344x768 and 24 frames a second, by its seconds."""


class Parallel(Enum):
    """What a rank holds of a weight: some of its outputs, or some of its inputs."""

    COLUMN = "n"
    ROW = "k"


@dataclass(frozen=True)
class Linear:
    """One linear on one rank.

    Attributes:
        name: short, for tables.
        layer: its name in the model, by which a method is chosen.
        k: inputs.
        n: outputs.
        parallel: how tensor parallelism splits it.
    """

    name: str
    layer: str
    k: int
    n: int
    parallel: Parallel

    def shard(self, ranks: int) -> Linear:
        """The part of one rank out of ``ranks``.

        Raises:
            ValueError: the split dimension is no multiple of ``ranks``.
        """
        size = getattr(self, self.parallel.value)
        if size % ranks:
            raise ValueError(f"{self.name}: {self.parallel.value} = {size} cannot be split over {ranks} ranks")
        return replace(self, **{self.parallel.value: size // ranks})

    def flops(self, tokens: int) -> int:
        return 2 * tokens * self.n * self.k

    def weight_bytes(self, element_size: int = 2) -> int:
        return self.n * self.k * element_size

    def activation_bytes(self, tokens: int, element_size: int = 2) -> int:
        """Bytes of the input and the output together."""
        return tokens * (self.k + self.n) * element_size


@dataclass(frozen=True)
class BlockShape:
    """A DiT block: attention with as many key heads as query heads, a SwiGLU MLP and its AdaLN projection."""

    hidden: int = 5376
    heads: int = 56
    head_dim: int = 128
    ffn: int = 14_336
    time_embed: int = 2688

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The four that run on every token, in the order in which they run."""
        inner = self.heads * self.head_dim
        return (
            Linear("qkv", "blocks.0.attn.qkv_proj", self.hidden, 3 * inner, Parallel.COLUMN),
            Linear("out", "blocks.0.attn.out_proj", inner, self.hidden, Parallel.ROW),
            Linear("fc1", "blocks.0.mlp.fc1", self.hidden, 2 * self.ffn, Parallel.COLUMN),
            Linear("fc2", "blocks.0.mlp.fc2", self.ffn, self.hidden, Parallel.ROW),
        )

    @property
    def adaln(self) -> Linear:
        """Six vectors for each of three modalities. It runs on a few timestep rows."""
        return Linear("adaln", "blocks.0.adaln_proj.linear", self.time_embed, 18 * self.hidden, Parallel.COLUMN)

    def linear_flops(self, tokens: int) -> int:
        """Of the four linears."""
        return sum(linear.flops(tokens) for linear in self.linears)

    def attention_flops(self, tokens: int) -> int:
        """Of the two products of attention."""
        return 4 * tokens * tokens * self.heads * self.head_dim

    def widths(self, ranks: int = 1) -> tuple[int, ...]:
        """The input widths that occur on a rank, ascending."""
        return tuple(sorted({linear.shard(ranks).k for linear in self.linears}))


H3 = BlockShape()
TINY = BlockShape(hidden=256, heads=2, head_dim=128, ffn=512, time_embed=128)
"""Small enough for a CPU."""


def quantize_bytes(tokens: int, k: int) -> int:
    """Bytes that quantizing ``(tokens, k)`` bf16 values must move: values in, 8-bit codes and fp32 scales out."""
    return tokens * (2 * k + k + 4)


def parse_tokens(text: str) -> tuple[int, ...]:
    """Token counts from a list such as ``"4s,15s,4096"``; ``4s`` is a clip of four seconds.

    Raises:
        ValueError: an entry that is neither a positive number nor a known clip.
    """
    clips = {f"{seconds}s": tokens for seconds, tokens in TOKENS.items()}
    return tuple(clips[part] if part in clips else _positive(part, clips) for part in text.split(","))


def parse_ranks(text: str) -> tuple[int, ...]:
    """Tensor-parallel sizes from a list such as ``"1,2,4"``.

    Raises:
        ValueError: an entry over which the model cannot be split.
    """
    return _chosen(text, TENSOR_PARALLEL)


def parse_rotations(text: str) -> tuple[int, ...]:
    """Widths of Hadamard groups from a list such as ``"128,256"``.

    Raises:
        ValueError: an entry that is no power of two from 2 to the largest group.
    """
    return _chosen(text, tuple(2**level for level in range(1, MAX_GROUP.bit_length())))


def _chosen(text: str, known: tuple[int, ...]) -> tuple[int, ...]:
    numbers = tuple(_positive(part) for part in text.split(","))
    for number in numbers:
        if number not in known:
            raise ValueError(f"{number} is none of {', '.join(map(str, known))}")
    return numbers


def _positive(part: str, names: dict[str, int] | None = None) -> int:
    if not part.isdecimal() or not int(part):
        known = f" or one of {', '.join(names)}" if names else ""
        raise ValueError(f"{part!r} is no positive number{known}")
    return int(part)
