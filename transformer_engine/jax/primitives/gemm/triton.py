"""Products of FP8 codes by the kernels of common/kernels/grouped_gemm.py, as one group of rows.

What XLA has no form for: a scale a block. And what it takes long to compile: one scale a tensor without its flag.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ....common.dispatch import Backend
from ....common.formats import BLOCK_1D, BLOCK_2D, FLOAT8, ceil_div
from ...platform import processors
from ..kernels import Kernel
from ..launching import refuses_on, run
from ..operand import Operand
from ..partitioning import Extent, extent
from ..several_axes import call_on_axes
from .flag import is_triton_off, warn_of_the_flag
from .request import GemmRequest

_BLOCK = 128
_RESULTS = (jnp.bfloat16, jnp.float16, jnp.float32)
_FORMATS = ((FLOAT8, FLOAT8), (BLOCK_1D, BLOCK_2D), (BLOCK_1D, BLOCK_1D))


def refuses(request: GemmRequest) -> str | None:
    if (reason := refuses_on(request.platform, "GemmPrimitive")) is not None:
        return reason
    if request.capability < 89:
        return f"compute capability {request.capability / 10} < 8.9 has no FP8 tensor cores"
    formats = (request.a_format, request.b_format)
    if None in formats:
        return "an operand is not quantized"
    if formats not in _FORMATS:
        return "it takes one scale a tensor, or 1x128 blocks times 128x128 or 1x128 blocks"
    if formats == (FLOAT8, FLOAT8) and is_triton_off():
        return "one scale a tensor, which XLA hands to cuBLASLt"
    if request.n % 16 or request.k % 16:
        return f"N={request.n} or K={request.k} is not a multiple of 16"
    if 0 in (request.m, request.n, request.k):
        return "a product without elements"
    if request.dtype not in _RESULTS:
        return f"a result in {request.dtype}; it writes bfloat16, float16 and float32"
    return None


@dataclass(frozen=True)
class Product(Kernel):
    """(a [M, K], b [N, K], scale of a, scale of b) -> out [M, N]

    Scales are [1] and [1]; or [ceil(K/128), M] with [ceil(N/128), ceil(K/128)] or, in rows too, [ceil(K/128), N].
    blocks   how many extents of b share a scale: None one scale a tensor, 128 or 1
    exact    one scale a tensor: partial sums are promoted to float32 every 128 elements
    """

    dtype: jnp.dtype
    exact: bool
    blocks: int | None
    n: int
    k: int
    led_by_results = True
    summed = (0,)

    @property
    def extents(self) -> tuple[Extent, Extent]:
        if self.blocks is None:
            return extent("n", self.n, 1), extent("k", self.k, 1)
        return extent("n", self.n, self.blocks), extent("k", self.k, _BLOCK)

    @property
    def rule(self) -> str:
        n, k = self.extents
        scales = "p, q"
        if self.blocks is not None:
            scales = f"{k.blocks} m, " + (
                f"{k.blocks} {n.whole}" if self.blocks == 1 else f"{n.blocks} {k.blocks}"
            )
        return f"m {k.whole}, {n.whole} {k.whole}, {scales} -> m {n.whole}"

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        return (jax.ShapeDtypeStruct((operands[0].shape[0], operands[1].shape[0]), self.dtype),)

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        from ....common.kernels import grouped_gemm as kernels  # it imports triton

        a, b, scale_a, scale_b = arrays
        (m, k), n = a.shape, b.shape[0]
        shared_memory = processors().shared_memory
        if self.blocks == 1:
            # Both operands are contracted along their rows: the kernel of gradients of weights.
            padding = ((0, 0), (0, -k % _BLOCK))
            a, b = (x if k % _BLOCK == 0 else jnp.pad(x, padding) for x in (a, b))
            launch = kernels.product_of_columns(
                m, n, 1, scaling=kernels.BLOCK_SCALES, shared_memory=shared_memory
            )
            inputs = [a, b, scale_a, scale_b, one_group(k), None]
            (out,) = run(launch, inputs, [jax.ShapeDtypeStruct((1, m, n), self.dtype)])
        else:
            scaling = kernels.TENSOR_SCALES if self.blocks is None else kernels.BLOCK_SCALES
            launch = kernels.product_of_rows(
                m,
                n,
                k,
                1,
                scaling=scaling,
                exact=self.exact and self.blocks is None,
                shared_memory=shared_memory,
            )
            inputs = [a, b, None, scale_a, scale_b, None, one_group(m)]
            (out,) = run(launch, inputs, [jax.ShapeDtypeStruct((m, n), self.dtype)])
        assert out is not None
        return (out.reshape(m, n),)


def one_group(rows: int) -> Array:
    """The layout of one group of rows: its first row and its end, its first tile and their end, its tiles' group."""
    tiles = ceil_div(rows, _BLOCK)
    groups = lax.iota(jnp.int32, rows // _BLOCK + 1) >= tiles
    # Operations, no constant: jax partitions no function over devices that holds one.
    ends = [lax.full((1,), end, jnp.int32) for end in (0, rows, 0, tiles)]
    return lax.concatenate([*ends, groups.astype(jnp.int32)], 0)


def bind(request: GemmRequest) -> Callable[..., Array]:
    if request.a_format == FLOAT8:
        warn_of_the_flag(request)
    return _run


def _run(a: Operand, b: Operand, dtype: jnp.dtype, exact: bool) -> Array:
    assert a.scale is not None and b.scale is not None
    scales, blocks = (a.scale, b.scale), None
    if a.format == BLOCK_1D:
        blocks = 1 if b.format == BLOCK_1D else _BLOCK
        scales = (a.scale.T, b.scale.T if blocks == 1 else b.scale)
    kernel = Product(dtype, exact, blocks, b.rows, a.depth)
    counts = {"m": a.axis, "n": b.axis, "k": a.codes.ndim - a.axis}
    out = call_on_axes(kernel, counts, a.codes, b.codes, *scales)[0]
    return out.reshape(*a.codes.shape[: a.axis], *b.codes.shape[: b.axis])


BACKEND = Backend[GemmRequest]("triton", refuses=refuses, bind=bind)
