"""What comes after an attention kernel that leaves V's mean out: the mean of each document, and codes if wanted.

``out[t, h] + mean[document of t, h]`` in fp32, rounded to the output's dtype, and from there ``quantize_rows`` over
all heads of a token. Both forms give the same values to what reads them next.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_h3_quant.kernels.attention.documents import TILE, TILE_FIELDS, Documents
from vllm_h3_quant.kernels.encode import as_bf16
from vllm_h3_quant.kernels.quantize import quantize_row, quantized, row_constants, tiles
from vllm_h3_quant.kernels.rows import QuantizedRows, RowFormat


def with_mean_reference(
    out: torch.Tensor, mean: torch.Tensor, documents: Documents, dtype: torch.dtype, row_format: RowFormat | None
) -> torch.Tensor | QuantizedRows:
    """:func:`with_mean` in plain PyTorch, for fp32 ``out``, which is rounded once."""
    whole = torch.zeros_like(out)
    begin = 0
    for document, length in enumerate(documents.spans[:, 2].tolist()):
        whole[begin : begin + length] = out[begin : begin + length] + mean[document]
        begin += length
    values = whole.to(dtype)
    return values if row_format is None else quantized(values.flatten(1), row_format)


def with_mean(
    out: torch.Tensor, mean: torch.Tensor, documents: Documents, dtype: torch.dtype, row_format: RowFormat | None
) -> torch.Tensor | QuantizedRows:
    """The mean added, and the result as values or as codes.

    Args:
        out: contiguous ``(tokens, heads, head_size)`` bf16. Values are written into it.
        mean: ``(documents, heads, head_size)`` fp32.
        documents: of the packed sequence. Tokens past the last one have no meaning, before or after.
        dtype: of the result.
        row_format: of the codes; None for values.
    """
    if row_format is None or dtype is not torch.bfloat16:
        values = add_mean(out, mean, documents).to(dtype)
        return values if row_format is None else quantized(values.flatten(1), row_format)
    return mean_codes(out, mean, documents, row_format)


def add_mean(out: torch.Tensor, mean: torch.Tensor, documents: Documents) -> torch.Tensor:
    """``out[t, h] += mean[document of t, h]`` in place, for a contiguous ``(tokens, heads, head_size)`` tensor."""
    _, heads, size = out.shape
    _add_mean_kernel[(documents.tiles.shape[0], heads)](
        out, mean, documents.tiles, heads, TILE=TILE, SIZE=size, num_warps=4
    )
    return out


def mean_codes(out: torch.Tensor, mean: torch.Tensor, documents: Documents, row_format: RowFormat) -> QuantizedRows:
    """Codes of :func:`add_mean`'s rows; ``out`` is read once and left as it is."""
    tokens, heads, size = out.shape
    width, fmt = heads * size, row_format.fmt
    codes = torch.empty(tokens, width, dtype=fmt.dtype, device=out.device)
    scale = torch.empty(tokens, 1, dtype=torch.float32, device=out.device)
    first, second, warps = tiles(width, row_format.rotation)
    _mean_codes_kernel[(tokens,)](
        out, mean, documents.cu_seqlens, codes, scale, documents.spans.shape[0], width,
        FIRST=first, SECOND=second, **row_constants(fmt, row_format.rotation), num_warps=warps,
    )  # fmt: skip
    return QuantizedRows(codes, scale, out.dtype, row_format)


@triton.jit
def _add_mean_kernel(out_ptr, mean_ptr, tiles_ptr, heads, TILE: tl.constexpr, SIZE: tl.constexpr):
    tile = tl.program_id(0)
    head = tl.program_id(1)
    document = tl.load(tiles_ptr + tile * TILE_FIELDS)
    token = tl.load(tiles_ptr + tile * TILE_FIELDS + 1).to(tl.int64) + tl.arange(0, TILE)
    kept = (tl.arange(0, TILE) < tl.load(tiles_ptr + tile * TILE_FIELDS + 2))[:, None]
    channel = tl.arange(0, SIZE)
    out = out_ptr + (token[:, None] * heads + head) * SIZE + channel
    mean = tl.load(mean_ptr + (document * heads + head) * SIZE + channel)
    value = tl.load(out, mask=kept, other=0.0).to(tl.float32) + mean[None, :]
    tl.store(out, value.to(out_ptr.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["documents"])
def _mean_codes_kernel(
    out_ptr,
    mean_ptr,
    cu_ptr,
    codes_ptr,
    scale_ptr,
    documents,
    width,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    MAX: tl.constexpr,
    AMAX_MIN: tl.constexpr,
    AMAX_MAX: tl.constexpr,
    FP8: tl.constexpr,
    OUTER: tl.constexpr,
    INNER: tl.constexpr,
    NORM: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    token = tl.program_id(0)
    document = 0
    for index in range(1, documents):
        document += (tl.load(cu_ptr + index) <= token).to(tl.int32)
    row = token.to(tl.int64)
    mean_row = mean_ptr + document * width
    first = _shifted(out_ptr + row * width, mean_row, 0, width, FIRST, INTERPRETED)
    if SECOND:
        second = _shifted(out_ptr + row * width, mean_row, FIRST, width, SECOND, INTERPRETED)
    else:
        second = first
    quantize_row(
        first, second, codes_ptr + row * width, scale_ptr + row, scale_ptr, width,
        MAX, AMAX_MIN, AMAX_MAX, FP8, False, OUTER, INNER, NORM, FIRST, SECOND, INTERPRETED,
    )  # fmt: skip


@triton.jit
def _shifted(row_ptr, mean_ptr, start, width, TILE: tl.constexpr, INTERPRETED: tl.constexpr):
    """A tile with the mean added, rounded to bf16."""
    column = start + tl.arange(0, TILE)
    inside = column < width
    value = tl.load(row_ptr + column, mask=inside, other=0.0).to(tl.float32)
    return as_bf16(value + tl.load(mean_ptr + column, mask=inside, other=0.0), INTERPRETED)
