"""Per-row 8-bit quantization, with an optional Hadamard rotation before it.

For each row of ``x`` of shape ``(M, K)``, with ``y = x`` or ``y = x H P`` (:mod:`.hadamard`) and
``norm = 1`` or ``1 / sqrt(group)``::

    amax    = clamp(max_k |y[k]|, AMAX_MIN, AMAX_MAX)
    divisor = amax / format.max, rounded up to 16 significant bits
    code    = clamp(y / divisor, -max, max)       (true division, round to nearest even)
    scale   = divisor * norm                      (fp32), so that  y * norm = code * scale

A row of zeros gets zero codes; which of e4m3's two zeros a value of -0 becomes is not defined. Infinite
values saturate at the largest finite fp32, so that they come out of a product as infinity and touch no
other row. A row that holds NaN gets zero codes and a NaN scale, so that the whole row comes out as NaN.

The kernel divides by two multiplications: ``r + r'`` is ``1 / divisor`` to 48 bits, and
``fma(y, r, y * r')`` is ``y / divisor`` before its last rounding with an error below ``2^-45`` of it
(Brisebarre and Muller, IEEE TC 57(2), 2008). A code could differ from that of the true quotient only
where ``y / divisor`` is that close to a point ``b`` beside a tie ``h`` between two codes where fp32
rounding goes from ``h`` to its neighbour, ``b = h +- ulp(h) / 2``. ``h`` has 8 significant bits at
most and the divisor 16, so ``h * divisor`` is a multiple of half an ulp of ``y``, and ``y`` stays
``2^-41`` of itself or more away from ``b * divisor``: the bytes are those of the true division.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from vllm_h3_quant.kernels.device import multiprocessors
from vllm_h3_quant.kernels.encode import encode
from vllm_h3_quant.kernels.formats import BY_NAME, FP8, CodeFormat
from vllm_h3_quant.kernels.hadamard import COLUMNS, check_group, factors, hadamard_reference, join_columns, rotate_tile
from vllm_h3_quant.kernels.rows import QuantizedRows, RowFormat

AMAX_MIN = 1e-28
"""Keeps every scale a normal number and gives subnormal values, which a device may flush, the code zero."""
AMAX_MAX = float(torch.finfo(torch.float32).max)
PRECISE_AMAX = tl.constexpr(2.0**100)
"""Largest amax for which the second half of the reciprocal keeps its bits; true division above."""
ELEMENTS_PER_WARP = 2048
"""Elements of a row that one warp keeps in its registers, 64 a thread."""
REGISTERS = 80
"""Registers a thread: 24 warps run at once on a multiprocessor."""
PREFETCH_REGISTERS = 128
"""The same where the next row is held too: 16 warps run at once."""


def quantize_rows(
    x: torch.Tensor,
    fmt: CodeFormat,
    *,
    rotation: int = 0,
    divisor: torch.Tensor | None = None,
    padded: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each row of ``x``.

    Args:
        x: ``(M, K)`` floating point, any strides.
        fmt: the code format.
        rotation: width of the Hadamard groups, 0 for none.
        divisor: ``(M, 1)`` fp32 divisors of :func:`row_divisors` to use; taken from ``x`` when None.
        padded: width of the codes, at least K; the columns past K are zero.

    Returns:
        ``(M, padded or K)`` contiguous codes and ``(M, 1)`` fp32 scales.

    Raises:
        ValueError: the rotation does not fit K.
    """
    if divisor is None:
        return _quantize_rows_op(x, fmt.name, rotation, padded or x.shape[1])
    return _implementation(x)(x, fmt, rotation=rotation, divisor=divisor, padded=padded)


def quantized(x: torch.Tensor, row_format: RowFormat) -> QuantizedRows:
    """:func:`quantize_rows` of ``(M, K)`` values as one value."""
    codes, scale = quantize_rows(x, row_format.fmt, rotation=row_format.rotation)
    return QuantizedRows(codes, scale, x.dtype, row_format)


def _implementation(x: torch.Tensor) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    return quantize_rows_triton if x.is_cuda else quantize_rows_reference


# An operator of its own, so that torch.compile sees one node with known shapes.
@torch.library.custom_op(
    "h3_quant::quantize_rows",
    mutates_args=(),
    schema="(Tensor x, str fmt, SymInt rotation, SymInt padded) -> (Tensor, Tensor)",
)
def _quantize_rows_op(x: torch.Tensor, fmt: str, rotation: int, padded: int) -> tuple[torch.Tensor, torch.Tensor]:
    return _implementation(x)(x, BY_NAME[fmt], rotation=rotation, padded=padded)


@_quantize_rows_op.register_fake
def _(x: torch.Tensor, fmt: str, rotation: int, padded: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = x.shape[0]
    return x.new_empty(rows, padded, dtype=BY_NAME[fmt].dtype), x.new_empty(rows, 1, dtype=torch.float32)


def rotation_norm(rotation: int) -> float:
    """``1 / sqrt(rotation)``, or 1 without a rotation."""
    return rotation**-0.5 if rotation else 1.0


def largest_scale(fmt: CodeFormat, rotation: int) -> float:
    """The scale of a row with an infinite value; every finite row has a smaller one."""
    return AMAX_MAX / fmt.max * rotation_norm(rotation)


def row_divisors(x: torch.Tensor, fmt: CodeFormat, *, rotation: int = 0) -> torch.Tensor:
    """The ``(M, 1)`` fp32 divisors that :func:`quantize_rows` would use for ``(M, K)`` values."""
    y = hadamard_reference(x, rotation) if rotation else x
    amax = y.abs().amax(dim=-1, keepdim=True).float()
    # By a tensor: PyTorch turns a division by a number into a product with its reciprocal on a GPU.
    exact = amax.clamp(AMAX_MIN, AMAX_MAX) / torch.full_like(amax, fmt.max)
    rounded = ((exact.view(torch.int32) + 0xFF) & -0x100).view(torch.float32)
    return torch.where(exact.isnan(), exact, rounded)


def quantize_rows_reference(
    x: torch.Tensor,
    fmt: CodeFormat,
    *,
    rotation: int = 0,
    divisor: torch.Tensor | None = None,
    padded: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`quantize_rows` in plain PyTorch."""
    rows, width = x.shape
    y = hadamard_reference(x, rotation) if rotation else x.float()
    if divisor is None:
        divisor = row_divisors(y, fmt)
    q = torch.nan_to_num(y / divisor, nan=0.0).clamp(-fmt.max, fmt.max)
    q = torch.where(divisor.isnan(), 0.0, q)
    if fmt.dtype is torch.int8:
        q = q.round()
    codes = torch.zeros(rows, padded or width, dtype=fmt.dtype, device=x.device)
    codes[:, :width] = q.to(fmt.dtype)
    return codes, divisor * rotation_norm(rotation)


def quantize_rows_triton(
    x: torch.Tensor,
    fmt: CodeFormat,
    *,
    rotation: int = 0,
    divisor: torch.Tensor | None = None,
    padded: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`quantize_rows` as one Triton launch, which reads each row once and keeps it in registers."""
    rows, width = x.shape
    if rotation:
        check_group(rotation, width)
    out_width = padded or width
    codes = torch.empty(rows, out_width, dtype=fmt.dtype, device=x.device)
    scale = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    if rows:
        first, second, warps = tiles(out_width, rotation)
        # Measured on an H200: of all rows, those of two rotated tiles alone gain by it.
        prefetch = second > 0 and rotation > 0
        resident = multiprocessors(x.device) * max(65536 // (32 * PREFETCH_REGISTERS * warps), 1)
        _quantize_rows_kernel[(min(rows, resident) if prefetch else rows,)](
            x,
            codes,
            scale,
            scale if divisor is None else divisor,
            rows,
            x.stride(0),
            x.stride(1),
            width,
            out_width,
            DIVISOR_GIVEN=divisor is not None,
            FIRST=first,
            SECOND=second,
            PREFETCH=prefetch,
            **row_constants(fmt, rotation),
            num_warps=warps,
            maxnreg=PREFETCH_REGISTERS if prefetch else REGISTERS,
        )
    return codes, scale


def row_constants(fmt: CodeFormat, rotation: int) -> dict[str, Any]:
    """Compile-time arguments of :func:`quantize_row` that follow from the format."""
    inner, outer = factors(rotation) if rotation else (1, 1)
    return {
        "MAX": fmt.max,
        "AMAX_MIN": AMAX_MIN,
        "AMAX_MAX": AMAX_MAX,
        "FP8": fmt is FP8,
        "OUTER": outer,
        "INNER": inner,
        "NORM": rotation_norm(rotation),
        "INTERPRETED": triton.knobs.runtime.interpret,
    }


def tiles(width: int, rotation: int) -> tuple[int, int, int]:
    """How a row lies in the registers of a program.

    Returns:
        Elements of the first tile and of the second, powers of two (0 for none) that cover
        ``width`` with less waste than one tile would, and the number of warps.
    """
    whole = max(triton.next_power_of_2(width), rotation, COLUMNS)
    warps = min(max(whole // ELEMENTS_PER_WARP, 1), 32)
    half = whole // 2
    # A thread that holds less than this of a tile repeats another's work.
    least = max(rotation, warps * 32 * (max(rotation // COLUMNS, COLUMNS) if rotation else 8))
    rest = max(triton.next_power_of_2(max(width - half, 1)), least)
    return (half, rest, warps) if half >= rest and half + rest < whole else (whole, 0, warps)


@triton.jit(do_not_specialize=["rows"])
def _quantize_rows_kernel(
    x_ptr,
    codes_ptr,
    scale_ptr,
    divisor_ptr,
    rows,
    stride_m,
    stride_k,
    width,
    out_width,
    MAX: tl.constexpr,
    AMAX_MIN: tl.constexpr,
    AMAX_MAX: tl.constexpr,
    FP8: tl.constexpr,
    DIVISOR_GIVEN: tl.constexpr,
    OUTER: tl.constexpr,
    INNER: tl.constexpr,
    NORM: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    PREFETCH: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    if PREFETCH:
        # A program takes rows in turn; the next one is on its way while the last is worked on.
        start = tl.program_id(0)
        next_first, next_second = _load_row(x_ptr + start.to(tl.int64) * stride_m, stride_k, width, FIRST, SECOND)
        for index in tl.range(start, rows, tl.num_programs(0)):
            row = tl.zeros((), tl.int64) + index  # the interpreter counts in Python integers
            first = next_first
            second = next_second
            ahead = tl.minimum(row + tl.num_programs(0), rows - 1)
            next_first, next_second = _load_row(x_ptr + ahead * stride_m, stride_k, width, FIRST, SECOND)
            quantize_row(
                first, second, codes_ptr + row * out_width, scale_ptr + row, divisor_ptr + row, out_width,
                MAX, AMAX_MIN, AMAX_MAX, FP8, DIVISOR_GIVEN, OUTER, INNER, NORM, FIRST, SECOND, INTERPRETED,
            )  # fmt: skip
    else:
        row = tl.program_id(0).to(tl.int64)
        first, second = _load_row(x_ptr + row * stride_m, stride_k, width, FIRST, SECOND)
        quantize_row(
            first, second, codes_ptr + row * out_width, scale_ptr + row, divisor_ptr + row, out_width,
            MAX, AMAX_MIN, AMAX_MAX, FP8, DIVISOR_GIVEN, OUTER, INNER, NORM, FIRST, SECOND, INTERPRETED,
        )  # fmt: skip


@triton.jit
def _load_row(row_ptr, stride_k, width, FIRST: tl.constexpr, SECOND: tl.constexpr):
    first = _load(row_ptr, 0, stride_k, width, FIRST)
    if SECOND:
        second = _load(row_ptr, FIRST, stride_k, width, SECOND)
    else:
        second = first
    return first, second


@triton.jit
def _load(row_ptr, start, stride_k, width, TILE: tl.constexpr):
    columns = start + tl.arange(0, TILE)
    return tl.load(row_ptr + columns.to(tl.int64) * stride_k, mask=columns < width, other=0.0)


@triton.jit
def quantize_row(
    raw_first,
    raw_second,
    out_ptr,
    scale_ptr,
    divisor_ptr,
    out_width,
    MAX: tl.constexpr,
    AMAX_MIN: tl.constexpr,
    AMAX_MAX: tl.constexpr,
    FP8: tl.constexpr,
    DIVISOR_GIVEN: tl.constexpr,
    OUTER: tl.constexpr,
    INNER: tl.constexpr,
    NORM: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    INTERPRETED: tl.constexpr,
    NEIGHBOURS: tl.constexpr = 16,
):
    """Write the codes and the scale of one row, given as one tile or two of any floating-point type.

    Columns past the row hold zeros. The divisor is read where DIVISOR_GIVEN. A thread stores NEIGHBOURS codes at once,
    which also decides how loads in the same kernel are spread over threads.
    """
    COLUMNS: tl.constexpr = OUTER if OUTER > 1 else INNER
    first = _rotated(raw_first, OUTER, INNER, FIRST)
    if SECOND:
        second = _rotated(raw_second, OUTER, INNER, SECOND)
    if DIVISOR_GIVEN:
        divisor = tl.load(divisor_ptr)
        precise = False
    else:
        bits = amax_bits(first, COLUMNS)
        if SECOND:
            if FIRST > SECOND:
                bits = tl.max(tl.reshape(bits, (FIRST // SECOND, SECOND // COLUMNS)), axis=0)
            bits = tl.maximum(bits, amax_bits(second, COLUMNS))
        amax = tl.max(bits, axis=0).to(tl.float32, bitcast=True)
        precise = amax <= PRECISE_AMAX
        divisor = _divisor(amax, MAX, AMAX_MIN, AMAX_MAX)
    tl.store(scale_ptr, divisor * NORM)
    if precise:
        _store_codes(first, out_ptr, out_width, divisor, MAX, FP8, COLUMNS, FIRST, False, INTERPRETED, NEIGHBOURS)
        if SECOND:
            out = out_ptr + FIRST
            width = out_width - FIRST
            _store_codes(second, out, width, divisor, MAX, FP8, COLUMNS, SECOND, False, INTERPRETED, NEIGHBOURS)
    else:
        _store_codes(first, out_ptr, out_width, divisor, MAX, FP8, COLUMNS, FIRST, True, INTERPRETED, NEIGHBOURS)
        if SECOND:
            out = out_ptr + FIRST
            width = out_width - FIRST
            _store_codes(second, out, width, divisor, MAX, FP8, COLUMNS, SECOND, True, INTERPRETED, NEIGHBOURS)


@triton.jit
def _rotated(raw, OUTER: tl.constexpr, INNER: tl.constexpr, TILE: tl.constexpr):
    """A tile as fp32, rotated: a tuple of the columns of a matrix (:func:`rotate_tile`)."""
    if INNER > 1:
        xs = rotate_tile(raw.to(tl.float32), TILE, OUTER, INNER)
    else:
        xs = (raw.to(tl.float32),)
    return xs


@triton.jit
def amax_bits(xs, COLUMNS: tl.constexpr):
    """Bits of the largest magnitudes over the tuple; as integers those of a NaN are larger than all others."""
    amax = tl.abs(xs[0])
    for i in tl.static_range(1, COLUMNS):
        amax = tl.maximum(amax, tl.abs(xs[i]), propagate_nan=tl.PropagateNan.ALL)
    return amax.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _divisor(amax, MAX: tl.constexpr, AMAX_MIN: tl.constexpr, AMAX_MAX: tl.constexpr):
    """``amax / MAX`` within its limits, rounded up to 16 significant bits; NaN stays."""
    limited = tl.where(amax != amax, amax, tl.minimum(tl.maximum(amax, AMAX_MIN), AMAX_MAX))
    exact = tl.div_rn(limited, MAX)
    rounded = ((exact.to(tl.int32, bitcast=True) + 0xFF) & -0x100).to(tl.float32, bitcast=True)
    return tl.where(exact != exact, exact, rounded)


@triton.jit
def _store_codes(
    xs,
    out_ptr,
    out_width,
    divisor,
    MAX: tl.constexpr,
    FP8: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    ANY_VALUE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
):
    reciprocal = tl.div_rn(1.0, divisor)
    rest = tl.fma(-reciprocal, divisor, 1.0) * reciprocal
    codes = ()
    for i in tl.static_range(COLUMNS):
        if ANY_VALUE:
            q = tl.div_rn(xs[i], divisor)
            q = tl.where(q != q, 0.0, tl.minimum(tl.maximum(q, -MAX), MAX))
        elif INTERPRETED:
            q = tl.div_rn(xs[i], divisor)  # the interpreter has no fused multiply-add
        else:
            q = tl.fma(xs[i], reciprocal, xs[i] * rest)
        codes = codes + (encode(q, out_ptr.dtype.element_ty, FP8, INTERPRETED),)
    if COLUMNS > 1:
        code = tl.reshape(join_columns(codes, TILE // COLUMNS, COLUMNS), (TILE,))
    else:
        code = codes[0]
    columns = tl.arange(0, TILE)
    if NEIGHBOURS < 16:
        columns = tl.max_contiguous(columns, NEIGHBOURS)
    tl.store(out_ptr + columns, code, mask=columns < out_width)
