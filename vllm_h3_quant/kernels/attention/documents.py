"""Where the documents of a packed sequence lie, in tiles that no document shares.

Tokens are packed: document ``d`` holds tokens ``cu_seqlens[d]`` to ``cu_seqlens[d + 1]``. Codes lie in
*slots*: each document starts at a multiple of :data:`TILE`, so that every step over the keys belongs to
one document and starts at an aligned address. The lengths are on the device and stay there; what the
host knows is an upper bound of the tiles.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

TILE = 128
"""Slots of a tile: keys of one step, and tokens that share a scale of K."""
TILE_FIELDS = tl.constexpr(3)
SPAN_FIELDS = tl.constexpr(3)
"""Numbers of a row of ``tiles`` and of ``spans``, which lie next to each other."""
_BLOCK = 256


class Documents(NamedTuple):
    """A packed sequence in tiles.

    Attributes:
        tokens: tokens of the sequence.
        longest: tokens of the longest document, or more.
        cu_seqlens: ``(D + 1,)`` int32: where documents begin, and where the last one ends.
        tiles: ``(T, 3)`` int32: document, its first token in the tile, tokens in the tile (0 for a spare
            tile past the last document).
        spans: ``(D, 3)`` int32: first tile of a document, its tiles, its tokens.
    """

    tokens: int
    longest: int
    cu_seqlens: torch.Tensor
    tiles: torch.Tensor
    spans: torch.Tensor

    @property
    def slots(self) -> int:
        return self.tiles.shape[0] * TILE


def locate_documents(cu_seqlens: torch.Tensor, tokens: int, longest: int) -> Documents:
    """Tiles of the documents of ``tokens`` tokens.

    Args:
        cu_seqlens: ``(D + 1,)`` int32, ascending, starting at 0 and at most ``tokens``; a document may be empty.
        tokens: tokens of the packed sequence.
        longest: tokens of the longest document, or more.
    """
    locate = locate_documents_triton if cu_seqlens.is_cuda else locate_documents_reference
    return locate(cu_seqlens, tokens, longest)


def most_tiles(documents: int, tokens: int) -> int:
    """Tiles that ``tokens`` tokens in ``documents`` documents fill at most: one partly filled a document."""
    return tokens // TILE + documents


def locate_documents_reference(cu_seqlens: torch.Tensor, tokens: int, longest: int) -> Documents:
    """:func:`locate_documents` in plain PyTorch; reads ``cu_seqlens`` on the host."""
    bounds = cu_seqlens.tolist()
    tiles: list[tuple[int, ...]] = []
    spans: list[tuple[int, ...]] = []
    for document, (begin, end) in enumerate(pairwise(bounds)):
        firsts = range(begin, end, TILE)
        spans.append((len(tiles), len(firsts), end - begin))
        tiles += [(document, first, min(TILE, end - first)) for first in firsts]
    tiles += [(0, 0, 0)] * (most_tiles(len(spans), tokens) - len(tiles))
    as_tensor: dict[str, Any] = {"dtype": torch.int32, "device": cu_seqlens.device}
    return Documents(tokens, longest, cu_seqlens, torch.tensor(tiles, **as_tensor), torch.tensor(spans, **as_tensor))


def locate_documents_triton(cu_seqlens: torch.Tensor, tokens: int, longest: int) -> Documents:
    """:func:`locate_documents` in one launch, without a word to the host."""
    documents = cu_seqlens.shape[0] - 1
    count = most_tiles(documents, tokens)
    tiles = torch.empty(count, TILE_FIELDS.value, dtype=torch.int32, device=cu_seqlens.device)
    spans = torch.empty(documents, SPAN_FIELDS.value, dtype=torch.int32, device=cu_seqlens.device)
    _locate_kernel[(triton.cdiv(count, _BLOCK),)](cu_seqlens, tiles, spans, documents, count, TILE=TILE, BLOCK=_BLOCK)
    return Documents(tokens, longest, cu_seqlens, tiles, spans)


@triton.jit(do_not_specialize=["documents", "count"])
def _locate_kernel(cu_ptr, tiles_ptr, spans_ptr, documents, count, TILE: tl.constexpr, BLOCK: tl.constexpr):
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    document = tl.zeros([BLOCK], tl.int32)
    token = tl.zeros([BLOCK], tl.int32)
    filled = tl.zeros([BLOCK], tl.int32)
    first = 0
    for index in range(documents):
        begin = tl.load(cu_ptr + index)
        length = tl.load(cu_ptr + index + 1) - begin
        whole = (length + TILE - 1) // TILE
        inside = (tile >= first) & (tile < first + whole)
        offset = (tile - first) * TILE
        document = tl.where(inside, index, document)
        token = tl.where(inside, begin + offset, token)
        filled = tl.where(inside, tl.minimum(length - offset, TILE), filled)
        if tl.program_id(0) == 0:
            span = spans_ptr + index * SPAN_FIELDS
            tl.store(span, first)
            tl.store(span + 1, whole)
            tl.store(span + 2, length)
        first += whole
    kept = tile < count
    out = tiles_ptr + tile * TILE_FIELDS
    tl.store(out, document, mask=kept)
    tl.store(out + 1, token, mask=kept)
    tl.store(out + 2, filled, mask=kept)
