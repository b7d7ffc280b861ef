"""MiniMax's own release: the model's names, and rows of ``qkv_proj`` by head."""

from __future__ import annotations

import re
from dataclasses import dataclass

from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.loader.architecture import Architecture
from vllm_h3_quant.loader.coding import Coding, Scaled
from vllm_h3_quant.loader.formats.base import Format, Layout, Signs, Target
from vllm_h3_quant.loader.header import Entry
from vllm_h3_quant.loader.stored import Segment

_QKV = ".attn.qkv_proj"
_BLOCK = "blocks."


@dataclass(frozen=True)
class NativeNames(Layout):
    """The model's own names, such as ``blocks.0.attn.qkv_proj.weight``."""

    def has(self, signs: Signs) -> bool:
        return any(name.startswith(_BLOCK) for name in signs.bare)

    def target(self, module: str) -> Target | None:
        return Target(module)

    def layer(self, name: str) -> int | None:
        found = re.match(rf"{re.escape(_BLOCK)}(\d+)\.", name)
        return int(found[1]) if found else None


@dataclass(frozen=True)
class _ByHead(NativeNames):
    """q, k and v of one head before those of the next."""

    def runs(self, module: str, rows: int, architecture: Architecture | None) -> list[tuple[int, int]]:
        if architecture is None or not module.endswith(_QKV):
            return super().runs(module, rows, architecture)
        width = architecture.attention_head_dim
        return [
            ((3 * head + third) * width, width)
            for third in range(3)
            for head in range(architecture.num_attention_heads)
        ]

    def segments(
        self, module: str, entry: Entry, coding: Coding, architecture: Architecture | None
    ) -> tuple[Segment, ...]:
        found = super().segments(module, entry, coding, architecture)
        head = found[0].rows
        if (
            len(found) > 1
            and isinstance(coding, Scaled)
            and head % coding.row_block
            and coding.row_block < entry.shape[0]
        ):
            raise H3QuantError(
                f"{entry.file}: tensor {entry.name!r} has one scale for {coding.row_block} rows, which straddles heads"
                f" of {head}: it cannot be reordered with the weight; convert the checkpoint with blocks that divide"
                f" {head}"
            )
        return found


BY_HEAD = _ByHead("rows of qkv_proj by head: q, k, v of one head, then of the next")


class Native(Format):
    """bf16 by the model's names, without any mark of another writer."""

    name = "MiniMax-H3 bf16"
    quantized = False

    @classmethod
    def told(cls, signs: Signs, layout: Layout | None) -> Format | None:
        return cls(layout) if layout == BY_HEAD else None
