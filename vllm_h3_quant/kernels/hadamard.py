"""Group-wise Hadamard rotation of the last dimension.

``y = x H P / sqrt(g)`` for each group of ``g`` neighbouring elements, with the Sylvester matrix
``H`` of order ``g``, a power of two, and a permutation ``P``. The rotation is orthogonal, so
rotating both operands of a product over the same dimension leaves the product as it is, while
single large channels spread over their group (QuaRot, arXiv 2404.00456).

``P`` spares the kernel a second exchange between threads. Groups of up to 16 keep their order; in
larger ones, with ``g = 16 a``, element ``a i + j`` of ``x H`` comes out at ``16 j + i``.

``x H`` is a butterfly in fp32 with strides a/2, ..., 2, 1, then g/2, ..., a. Every step is a correctly
rounded addition, so each implementation that keeps this order gives the same bytes. Quantization
works on ``x H P`` and multiplies only its scales by ``1 / sqrt(g)``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MAX_GROUP = 512
COLUMNS = 16
"""Codes that a thread writes at once, 16 bytes."""


def largest_group(size: int, limit: int) -> int:
    """The largest power of two up to ``limit`` that divides ``size``; 0 when that is 1."""
    group = min(size & -size, limit)
    return group if group > 1 else 0


def check_group(group: int, width: int) -> None:
    """Refuse a group that is no power of two up to :data:`MAX_GROUP` or does not divide ``width``.

    Raises:
        ValueError: with both numbers.
    """
    if not 2 <= group <= MAX_GROUP or group & (group - 1) or width % group:
        raise ValueError(f"Hadamard group {group} must be a power of two up to {MAX_GROUP} that divides {width}")


def factors(group: int) -> tuple[int, int]:
    """``(inner, outer)`` with ``inner * outer = group``: neighbours first, then elements ``inner`` apart.

    One of them is :data:`COLUMNS`, or ``outer`` is 1 for smaller groups.
    """
    return (group // COLUMNS, COLUMNS) if group > COLUMNS else (group, 1)


def hadamard_reference(x: torch.Tensor, group: int) -> torch.Tensor:
    """``x H P`` in groups of ``group`` along the last dimension, not yet divided by ``sqrt(group)``; fp32.

    Raises:
        ValueError: ``group`` does not fit.
    """
    check_group(group, x.shape[-1])
    inner, outer = factors(group)
    y = _butterfly_reference(x.float().reshape(-1, inner))
    if outer > 1:
        y = _butterfly_reference(y.reshape(-1, outer, inner).transpose(1, 2))
    return y.reshape(x.shape)


def undo_hadamard(y: torch.Tensor, group: int) -> torch.Tensor:
    """``x`` of ``y = x H P / sqrt(group)``; fp32.

    Raises:
        ValueError: ``group`` does not fit.
    """
    check_group(group, y.shape[-1])
    inner, outer = factors(group)
    x = y.float()
    if outer > 1:
        x = _butterfly_reference(x.reshape(-1, inner, outer)).transpose(1, 2)
    return _butterfly_reference(x.reshape(-1, inner)).reshape(y.shape) * group**-0.5


def _butterfly_reference(x: torch.Tensor) -> torch.Tensor:
    """``x H`` over the whole last dimension."""
    size = x.shape[-1]
    stride = size // 2
    y = x.reshape(-1, size)
    while stride:
        first, second = y.reshape(-1, 2, stride).unbind(1)
        y = torch.stack((first + second, first - second), dim=1)
        stride //= 2
    return y.reshape(x.shape)


# In Triton a tile is a tuple of tensors. An addition between two of them stays in a thread's
# registers: neighbours lie in a thread as they are loaded, and one exchange within the warp brings
# the elements of the remaining strides together.


@triton.jit
def rotate_tile(x, TILE: tl.constexpr, OUTER: tl.constexpr, INNER: tl.constexpr):
    """Rotate a vector of TILE fp32 elements in groups of OUTER * INNER.

    The result is a tuple whose tensor c holds column c of a matrix that, row by row, is the rotated
    tile. It has OUTER columns, or INNER where OUTER is 1.
    """
    xs = _butterfly(split_columns(tl.reshape(x, (TILE // INNER, INNER)), TILE // INNER, INNER), INNER)
    if OUTER > 1:
        turned = tl.reshape(join_columns(xs, TILE // INNER, INNER), (TILE // OUTER // INNER, OUTER, INNER))
        turned = tl.reshape(tl.permute(turned, (0, 2, 1)), (TILE // OUTER, OUTER))
        xs = _butterfly(split_columns(turned, TILE // OUTER, OUTER), OUTER)
    return xs


@triton.jit
def join_columns(xs, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A ``(ROWS, COLUMNS)`` tensor from its columns, a tuple of a power of two from 2 to 32."""
    ys = ()
    for i in tl.static_range(COLUMNS // 2):
        ys = ys + (tl.join(xs[2 * i], xs[2 * i + 1]),)
    if COLUMNS >= 4:
        ys = _join_pairs(ys, ROWS, COLUMNS // 4, 2)
    if COLUMNS >= 8:
        ys = _join_pairs(ys, ROWS, COLUMNS // 8, 4)
    if COLUMNS >= 16:
        ys = _join_pairs(ys, ROWS, COLUMNS // 16, 8)
    if COLUMNS >= 32:
        ys = _join_pairs(ys, ROWS, COLUMNS // 32, 16)
    return ys[0]


@triton.jit
def _join_pairs(xs, ROWS: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    ys = ()
    for i in tl.static_range(COUNT):
        pair = tl.permute(tl.join(xs[2 * i], xs[2 * i + 1]), (0, 2, 1))
        ys = ys + (tl.reshape(pair, (ROWS, 2 * WIDTH)),)
    return ys


@triton.jit
def split_columns(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The columns of a ``(ROWS, COLUMNS)`` tensor as a tuple, for a power of two of them up to 32."""
    xs = (x,)
    if COLUMNS >= 32:
        xs = _split_halves(xs, ROWS, COLUMNS // 32, 16)
    if COLUMNS >= 16:
        xs = _split_halves(xs, ROWS, COLUMNS // 16, 8)
    if COLUMNS >= 8:
        xs = _split_halves(xs, ROWS, COLUMNS // 8, 4)
    if COLUMNS >= 4:
        xs = _split_halves(xs, ROWS, COLUMNS // 4, 2)
    ys = ()
    for i in tl.static_range(COLUMNS // 2):
        first, second = tl.split(xs[i])
        ys = ys + (first, second)
    if COLUMNS == 1:
        ys = (tl.reshape(x, (ROWS,)),)
    return ys


@triton.jit
def _split_halves(xs, ROWS: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    ys = ()
    for i in tl.static_range(COUNT):
        first, second = tl.split(tl.permute(tl.reshape(xs[i], (ROWS, 2, WIDTH)), (0, 2, 1)))
        ys = ys + (first, second)
    return ys


@triton.jit
def _butterfly(xs, SIZE: tl.constexpr):
    if SIZE >= 32:
        xs = _butterfly_step(xs, SIZE, 16)
    if SIZE >= 16:
        xs = _butterfly_step(xs, SIZE, 8)
    if SIZE >= 8:
        xs = _butterfly_step(xs, SIZE, 4)
    if SIZE >= 4:
        xs = _butterfly_step(xs, SIZE, 2)
    return _butterfly_step(xs, SIZE, 1)


@triton.jit
def _butterfly_step(xs, SIZE: tl.constexpr, STRIDE: tl.constexpr):
    ys = ()
    for i in tl.static_range(SIZE):
        if (i // STRIDE) % 2 == 0:
            ys = ys + (xs[i] + xs[i + STRIDE],)
        else:
            ys = ys + (xs[i - STRIDE] - xs[i],)
    return ys
