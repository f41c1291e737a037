"""Parts for products of block-scaled codes: operands as data, the operations after the product, and tile sizes."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from .activation import curve, curve_and_slope
from .launch import Output


@triton.jit
def scale_by_maxima(
    total, level_a, level_b, m, n, M, N, RANGE, ROWS_A: tl.constexpr, ROWS_B: tl.constexpr
):
    """Compute total * RANGE * level_a * level_b, from per-tensor maxima [1] or from maxima for rows m [M] and n [N]."""
    total *= RANGE
    if ROWS_A:
        total *= tl.load(level_a + m, mask=m < M, other=0.0)[:, None]
    else:
        total *= tl.load(level_a)
    if ROWS_B:
        total *= tl.load(level_b + n, mask=n < N, other=0.0)[None, :]
    else:
        total *= tl.load(level_b)
    return total


@triton.jit
def finish(
    total,
    bias,
    x,
    out,
    kept,
    m,
    n,
    M,
    N,
    ROW_STRIDE,
    COLUMN_STRIDE,
    ALONG_ROWS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Add a bias, along the columns or ALONG_ROWS, and the values of out if ACCUMULATE; store rows m and columns n.

    ACTIVATION "gelu" stores gelu(y) for the rounded sum y, and y in `kept` if present; "gelu_gradient" multiplies y by
    GELU's derivative at `x`. Both have `out`'s layout.
    """
    inside = (m < M)[:, None] & (n < N)[None, :]
    if bias is not None:
        if ALONG_ROWS:
            total += tl.load(bias + m, mask=m < M, other=0.0).to(tl.float32)[:, None]
        else:
            total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    places = m.to(tl.int64)[:, None] * ROW_STRIDE + n.to(tl.int64)[None, :] * COLUMN_STRIDE
    if ACCUMULATE:
        total += tl.load(out + places, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION != "":
        rounded = total.to(out.dtype.element_ty)
        if kept is not None:
            tl.store(kept + places, rounded, mask=inside)
        total = rounded.to(tl.float32)
        if ACTIVATION == "gelu":
            total = curve(total, "gelu")
        else:
            _, slope = curve_and_slope(
                tl.load(x + places, mask=inside, other=0.0).to(tl.float32), "gelu"
            )
            total = total * slope
    tl.store(out + places, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def finish_with_tma(
    total,
    bias,
    x,
    out,
    kept,
    first_m,
    first_n,
    M,
    N,
    ROW_STRIDE,
    ACCUMULATE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute `finish` for a row-major result, whose tiles TMA reads and writes."""
    n = first_n + tl.arange(0, COLUMNS)
    row_stride = tl.cast(ROW_STRIDE, tl.int64)
    results = tl.make_tensor_descriptor(out, [M, N], [row_stride, 1], [ROWS, COLUMNS])
    if bias is not None:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if ACCUMULATE:
        total += results.load([first_m, first_n]).to(tl.float32)
    if ACTIVATION != "":
        rounded = total.to(out.dtype.element_ty)
        if kept is not None:
            copies = tl.make_tensor_descriptor(kept, [M, N], [row_stride, 1], [ROWS, COLUMNS])
            copies.store([first_m, first_n], rounded)
        total = rounded.to(tl.float32)
        if ACTIVATION == "gelu":
            total = curve(total, "gelu")
        else:
            inputs = tl.make_tensor_descriptor(x, [M, N], [row_stride, 1], [ROWS, COLUMNS])
            _, slope = curve_and_slope(inputs.load([first_m, first_n]).to(tl.float32), "gelu")
            total = total * slope
    results.store([first_m, first_n], total.to(out.dtype.element_ty))


class Side(NamedTuple):
    """One operand in a product, without its tensors.

    Attributes:
        rows: Number of rows.
        leading: Bytes from one code row to the next.
        element: Element name: "e4m3", "e5m2" or "e2m1".
        levels: Number of second-level scales: 0, 1 or `rows`.
        unit: Rows that share a float32 scale for 128 columns; 0 for swizzled one-byte scales.
        strides: Elements between float32 scales of consecutive blocks, along the rows and along the columns.
    """

    rows: int
    leading: int
    element: str
    levels: int = 0
    unit: int = 0
    strides: tuple[int, int] = (0, 0)


class ProductEpilogue(NamedTuple):
    """The operations after a product, without their tensors.

    Attributes:
        accumulates: Add to the values of the result.
        activation: "", "gelu" or "gelu_gradient".
        keeps: Also store the input of GELU.
    """

    accumulates: bool = False
    activation: str = ""
    keeps: bool = False

    def outputs(self, shape: tuple[int, int], dtype: str | None) -> tuple[Output | None, ...]:
        """Results that a launch allocates."""
        if self.accumulates:
            return ()
        return Output(shape, dtype), Output(shape, dtype) if self.keeps else None


NO_EPILOGUE = ProductEpilogue()


class TmaOptions(NamedTuple):
    """How a product with swizzled scales uses TMA; without it, tiles are loaded through pointers.

    TMA requires addresses and row strides that are multiples of 16 bytes.

    Attributes:
        operands: TMA loads codes and scales.
        results: TMA loads and stores the result, the input of GELU and its copy, unless the product is swapped.
    """

    operands: bool = False
    results: bool = False


NO_TMA = TmaOptions()


def is_swapped(rows: int, columns: int) -> bool:
    """Whether the result is computed as its transpose, since it has few rows."""
    return rows <= 64 and columns > rows


def choose_tile(columns: int) -> tuple[int, int, int, int]:
    """Choose (rows, columns, stages, warps) for a program's tile; `columns` are the result's."""
    # Compiled for every row in the hardware table with Triton 3.7. On 10.x and 11.0 tl.dot_scaled becomes a bfloat16
    # product below 128 rows. 8 warps need 94 to 244 registers and no stack; 4 warps up to 900 bytes of stack on 12.x.
    # Three stages fit the 99 KiB on 8.9 and 12.x.
    if columns > 64:
        return 128, 128, 3, 8
    return 128, max(16, triton.next_power_of_2(columns)), 3, 4
