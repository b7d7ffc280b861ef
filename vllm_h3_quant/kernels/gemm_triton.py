"""Scaled 8-bit product in Triton, for INT8 and FP8 codes.

``out[m, n] = (sum_k a[m, k] * b[k, n]) * scale_a[m] * scale_b[n] + bias[n]`` with an int32 or fp32
sum. Each program walks over output tiles, so that the next tile's operands are fetched while the
scales of the last one are applied; operands and output travel through tensor descriptors (TMA where
the GPU has it, plain loads elsewhere).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from vllm_h3_quant.kernels.device import multiprocessors
from vllm_h3_quant.kernels.product import Product


@dataclass(frozen=True)
class Tile:
    """One way to cut the product: output rows and columns, depth of a step, warps, steps in flight."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


LARGE_SHARED_MEMORY = Tile(rows=128, columns=256, depth=128, warps=8, stages=3)
"""147 KiB of operands in flight: sm_80, sm_90, sm_100."""
SMALL_SHARED_MEMORY = Tile(rows=128, columns=128, depth=64, warps=8, stages=3)
"""48 KiB: the 99 KiB of sm_86, sm_89, sm_120."""
GROUP_ROWS = 8
"""Tiles of this many row blocks run next to each other, so that they share their columns in L2."""


def scaled_gemm_triton(product: Product, *, tile: Tile | None = None) -> torch.Tensor:
    """The product in one launch; K must be a multiple of 16 and N of 8 (descriptors need 16-byte rows)."""
    a, b, scale_a, scale_b, bias, _ = product
    rows, depth = a.shape
    columns = b.shape[1]
    tile = tile or default_tile(a.device)
    out = product.empty_out()
    programs = min(multiprocessors(a.device), triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns))
    _scaled_gemm_kernel[(programs,)](
        TensorDescriptor.from_tensor(a, [tile.rows, tile.depth]),
        TensorDescriptor.from_tensor(b.t(), [tile.columns, tile.depth]),
        TensorDescriptor.from_tensor(out, [tile.rows, tile.columns // 2]),
        scale_a,
        scale_b,
        scale_b if bias is None else bias,
        rows,
        columns,
        depth,
        HAS_BIAS=bias is not None,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        GROUP_ROWS=GROUP_ROWS,
        PROGRAMS=programs,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


@cache
def default_tile(device: torch.device) -> Tile:
    """The largest tile that fits the device's shared memory."""
    if device.type != "cuda":
        return SMALL_SHARED_MEMORY
    available = torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]
    return LARGE_SHARED_MEMORY if available >= 160 * 1024 else SMALL_SHARED_MEMORY


@triton.jit
def _scaled_gemm_kernel(
    a_desc,
    b_desc,
    out_desc,
    scale_a_ptr,
    scale_b_ptr,
    bias_ptr,
    rows,
    columns,
    depth,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    row_tiles = tl.cdiv(rows, ROWS)
    column_tiles = tl.cdiv(columns, COLUMNS)
    steps = tl.cdiv(depth, DEPTH)
    SUM: tl.constexpr = tl.int32 if a_desc.dtype == tl.int8 else tl.float32
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, PROGRAMS, flatten=True):
        group = tile // (GROUP_ROWS * column_tiles)
        first_row = group * GROUP_ROWS
        group_rows = tl.minimum(row_tiles - first_row, GROUP_ROWS)
        in_group = tile % (GROUP_ROWS * column_tiles)
        row = (first_row + in_group % group_rows) * ROWS
        column = (in_group // group_rows) * COLUMNS
        total = tl.zeros((ROWS, COLUMNS), dtype=SUM)
        for step in range(steps):
            a = a_desc.load([row, step * DEPTH])
            b = b_desc.load([column, step * DEPTH])
            total = tl.dot(a, b.T, total, out_dtype=SUM)
        row_ids = row + tl.arange(0, ROWS)
        scale_a = tl.load(scale_a_ptr + row_ids, mask=row_ids < rows, other=0.0)
        # In two halves, which take half the registers and shared memory of the whole tile.
        halves = tl.permute(tl.reshape(total, (ROWS, 2, COLUMNS // 2)), (0, 2, 1))
        left, right = tl.split(halves)
        _store_half(left, out_desc, scale_a, scale_b_ptr, bias_ptr, row, column, columns, HAS_BIAS, COLUMNS // 2)
        _store_half(
            right, out_desc, scale_a, scale_b_ptr, bias_ptr, row, column + COLUMNS // 2, columns, HAS_BIAS, COLUMNS // 2
        )


@triton.jit
def _store_half(
    total,
    out_desc,
    scale_a,
    scale_b_ptr,
    bias_ptr,
    row,
    column,
    columns,
    HAS_BIAS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    column_ids = column + tl.arange(0, WIDTH)
    inside = column_ids < columns
    scale_b = tl.load(scale_b_ptr + column_ids, mask=inside, other=0.0)
    out = total.to(tl.float32) * scale_a[:, None] * scale_b[None, :]
    if HAS_BIAS:
        out += tl.load(bias_ptr + column_ids, mask=inside, other=0.0).to(tl.float32)[None, :]
    out_desc.store([row, column], out.to(out_desc.dtype))
