"""Activations f(a) and f(a) * b and their gradients, for x = a [rows, width] or [a, b] [rows, 2 * width], in float32.

All curves use the logistic function, because 0.5 * (1 + tanh(u)) = sigmoid(2u) has no cancellation. The only
transcendental function is the exponential, which Triton's interpreter supports too. Comparisons are written so that
NaN passes through.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..formats import ceil_div
from .launch import Launch, Output

# Public activation name -> name of f.
CURVES = {
    "gelu": "gelu",
    "geglu": "gelu",
    "glu": "sigmoid",
    "qgelu": "qgelu",
    "qgeglu": "qgelu",
    "relu": "relu",
    "reglu": "relu",
    "srelu": "srelu",
    "sreglu": "srelu",
    "silu": "silu",
    "swiglu": "silu",
    "clamped_swiglu": "clamped",
}
# Elements per program; H200: 3.9-4.1 of the 4.13 TB/s of a copy, the same for 512 to 4096.
_TILE = 2048

# Tensors come first in products: the interpreter of Triton 3.7 leaves constant * tensor a constant.
GELU_SCALE = tl.constexpr(1.5957691216057308)  # 2 * sqrt(2 / pi)
GELU_CUBIC = tl.constexpr(0.044715)
QGELU_ALPHA = tl.constexpr(1.702)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def curve(x, CURVE: tl.constexpr):
    """Compute f(x)."""
    if CURVE == "gelu":
        return x * _sigmoid((x + x * GELU_CUBIC * x * x) * GELU_SCALE)
    elif CURVE == "qgelu":
        return x * _sigmoid(x * QGELU_ALPHA)
    elif CURVE == "silu":
        return x * _sigmoid(x)
    elif CURVE == "sigmoid":
        return _sigmoid(x)
    elif CURVE == "relu":
        return tl.where(x <= 0.0, 0.0, x)
    else:
        tl.static_assert(CURVE == "srelu")
        positive = tl.where(x <= 0.0, 0.0, x)
        return positive * positive


@triton.jit
def curve_and_slope(x, CURVE: tl.constexpr):
    """Compute f(x) and f'(x)."""
    if CURVE == "gelu":
        sigmoid = _sigmoid((x + x * GELU_CUBIC * x * x) * GELU_SCALE)
        inner = (1.0 + x * (3.0 * GELU_CUBIC) * x) * GELU_SCALE
        return x * sigmoid, sigmoid + x * sigmoid * (1.0 - sigmoid) * inner
    elif CURVE == "qgelu":
        sigmoid = _sigmoid(x * QGELU_ALPHA)
        return x * sigmoid, sigmoid + x * QGELU_ALPHA * sigmoid * (1.0 - sigmoid)
    elif CURVE == "silu":
        sigmoid = _sigmoid(x)
        return x * sigmoid, sigmoid + x * sigmoid * (1.0 - sigmoid)
    elif CURVE == "sigmoid":
        sigmoid = _sigmoid(x)
        return sigmoid, sigmoid * (1.0 - sigmoid)
    elif CURVE == "relu":
        return tl.where(x <= 0.0, 0.0, x), tl.where(x <= 0.0, 0.0, 1.0)
    else:
        tl.static_assert(CURVE == "srelu")
        positive = tl.where(x <= 0.0, 0.0, x)
        return positive * positive, 2.0 * positive


@triton.jit
def _clamp(x, limit):
    return tl.where(x > limit, limit, tl.where(x < -limit, -limit, x))


@triton.jit
def gated(a, b, limit, alpha, offset, CURVE: tl.constexpr):
    """Compute f(a) * b; for "clamped": min(a, limit) * sigmoid(alpha * min(a, limit)) * (clamp(b) + offset)."""
    if CURVE == "clamped":
        a = tl.where(a > limit, limit, a)
        return a * _sigmoid(alpha * a) * (_clamp(b, limit) + offset)
    else:
        return curve(a, CURVE) * b


@triton.jit
def gated_gradients(dy, a, b, limit, alpha, offset, CURVE: tl.constexpr):
    """Compute the gradients (da, db) of `gated` for dy."""
    if CURVE == "clamped":
        bounded = tl.where(a > limit, limit, a)
        sigmoid = _sigmoid(alpha * bounded)
        slope = sigmoid + alpha * bounded * sigmoid * (1.0 - sigmoid)
        da = tl.where(a > limit, 0.0, dy * slope * (_clamp(b, limit) + offset))
        db = tl.where(tl.abs(b) > limit, 0.0, dy * bounded * sigmoid)
        return da, db
    else:
        value, slope = curve_and_slope(a, CURVE)
        return dy * slope * b, dy * value


@triton.jit
def _tile(width, BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """Row and column numbers of this program's tile."""
    tiles = tl.cdiv(width, BLOCK_WIDTH)
    row = tl.program_id(0) // tiles * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    return row, tl.program_id(0) % tiles * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)


@triton.jit
def forward_kernel(
    x,
    y,
    rows,
    width,
    x_stride,
    limit,
    alpha,
    offset,
    CURVE: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """Compute one tile of y; tiles are numbered along the rows first."""
    row, column = _tile(width, BLOCK_ROWS, BLOCK_WIDTH)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    source = x + row.to(tl.int64)[:, None] * x_stride + column[None, :]
    a = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        b = tl.load(source + width, mask=mask, other=0.0).to(tl.float32)
        result = gated(a, b, limit, alpha, offset, CURVE)
    else:
        result = curve(a, CURVE)
    target = y + row.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(target, result.to(y.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(
    dy,
    x,
    dx,
    rows,
    width,
    dy_stride,
    x_stride,
    limit,
    alpha,
    offset,
    CURVE: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """Compute the same tile of dx, and of its second half if gated."""
    row, column = _tile(width, BLOCK_ROWS, BLOCK_WIDTH)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    offset_rows = row.to(tl.int64)[:, None]
    source = x + offset_rows * x_stride + column[None, :]
    a = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    gradient = tl.load(dy + offset_rows * dy_stride + column[None, :], mask=mask, other=0.0).to(
        tl.float32
    )
    if GATED:
        b = tl.load(source + width, mask=mask, other=0.0).to(tl.float32)
        da, db = gated_gradients(gradient, a, b, limit, alpha, offset, CURVE)
        target = dx + offset_rows * (2 * width) + column[None, :]
        tl.store(target, da.to(dx.dtype.element_ty), mask=mask)
        tl.store(target + width, db.to(dx.dtype.element_ty), mask=mask)
    else:
        _, slope = curve_and_slope(a, CURVE)
        target = dx + offset_rows * width + column[None, :]
        tl.store(target, (gradient * slope).to(dx.dtype.element_ty), mask=mask)


def forward(
    name: str,
    gated: bool,
    rows: int,
    width: int,
    x_stride: int,
    dtype: str,
    constants: tuple[float, float, float],
) -> Launch:
    """Launch (x [rows, width] or [rows, 2 * width]) -> y [rows, width].

    `constants` are the limit, alpha and offset for "clamped".
    """
    block_rows, block_width, grid = _tiling(rows, width)
    scalars = (rows, width, x_stride, *constants)
    outputs = (Output((rows, width), dtype),)
    return Launch(
        forward_kernel,
        grid,
        outputs,
        scalars,
        (CURVES[name], gated, block_rows, block_width),
        warps=4,
    )


def backward(
    name: str,
    gated: bool,
    rows: int,
    width: int,
    strides: tuple[int, int],
    dtype: str,
    constants: tuple[float, float, float],
) -> Launch:
    """Launch (dy [rows, width], x) -> dx, shaped like x; `strides` belong to dy and x."""
    block_rows, block_width, grid = _tiling(rows, width)
    scalars = (rows, width, *strides, *constants)
    outputs = (Output((rows, 2 * width if gated else width), dtype),)
    return Launch(
        backward_kernel,
        grid,
        outputs,
        scalars,
        (CURVES[name], gated, block_rows, block_width),
        warps=4,
    )


def _tiling(rows: int, width: int) -> tuple[int, int, tuple[int, int, int]]:
    block_width = min(triton.next_power_of_2(width), _TILE)
    block_rows = min(_TILE // block_width, triton.next_power_of_2(rows))
    return (
        block_rows,
        block_width,
        (ceil_div(rows, block_rows) * ceil_div(width, block_width), 1, 1),
    )
