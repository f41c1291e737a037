"""A product of FP8 codes by kernels of ours, as a primitive: how devices cut it, and which kernel runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ....common.formats import BLOCK_1D, ceil_div
from ...platform import processors
from ..kernels import Kernel
from ..launching import run
from ..operand import Operand
from ..partitioning import Extent, extent
from ..several_axes import call_on_axes

_BLOCK = 128


def multiplied(a: Operand, b: Operand, dtype: jnp.dtype, exact: bool, by_groups: bool = False) -> Array:
    """a [*M, *K] @ b [*N, *K].T in dtype; by_groups: see `Product`."""
    assert a.scale is not None and b.scale is not None
    scales, blocks = (a.scale, b.scale), None
    if a.format == BLOCK_1D:
        blocks = 1 if b.format == BLOCK_1D else _BLOCK
        scales = (a.scale.T, b.scale.T if blocks == 1 else b.scale)
    kernel = Product(dtype, exact, blocks, b.rows, a.depth, by_groups)
    counts = {"m": a.axis, "n": b.axis, "k": a.codes.ndim - a.axis}
    out = call_on_axes(kernel, counts, a.codes, b.codes, *scales)[0]
    return out.reshape(*a.codes.shape[: a.axis], *b.codes.shape[: b.axis])


@dataclass(frozen=True)
class Product(Kernel):
    """(a [M, K], b [N, K], scale of a, scale of b) -> out [M, N]

    Scales are [1] and [1]; or [ceil(K/128), M] with [ceil(N/128), ceil(K/128)] or, in rows too, [ceil(K/128), N].
    blocks   how many extents of b share a scale: None one scale a tensor, 128 or 1
    exact    one scale a tensor: partial sums are promoted to float32 every 128 elements
    by_groups   blocks: by the kernel of block_product.py, whose warps work in groups, where a device's part fits it
    """

    dtype: jnp.dtype
    exact: bool
    blocks: int | None
    n: int
    k: int
    by_groups: bool = False
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
        (m, k), n = arrays[0].shape, arrays[1].shape[0]
        if self.by_groups and (unfit(m, n, k) or idle(m, n)) is None:
            return (self._run_by_groups(*arrays),)
        return (self._run_as_one_group(*arrays),)

    def _run_by_groups(self, a: Array, b: Array, scale_a: Array, scale_b: Array) -> Array:
        from ....common.kernels.block_product import product  # it imports triton

        (m, k), n = a.shape, b.shape[0]
        launch = product(m, n, k, self.dtype.name, by_row=self.blocks == 1, processors=processors().count)
        (out,) = run(launch, [a, b, scale_a, scale_b])
        assert out is not None
        return out

    def _run_as_one_group(self, a: Array, b: Array, scale_a: Array, scale_b: Array) -> Array:
        from ....common.kernels import grouped_gemm as kernels  # it imports triton

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
        return out.reshape(m, n)


def unfit(m: int, n: int, k: int) -> str | None:
    """Why the kernel of block_product.py does not take a product of these extents, None if it does."""
    if n % 16 or k % 16:
        return f"N={n} or K={k} is not a multiple of 16"
    if m % 4:
        return f"M={m} is not a multiple of 4: the copy engine fetches scales from multiples of 16 bytes"
    if max(m, n) * ceil_div(k, _BLOCK) >= 1 << 31:
        return f"{max(m, n)} x {ceil_div(k, _BLOCK)} scales are more than 2^31"
    return None


def idle(m: int, n: int) -> str | None:
    """Why the tiles of block_product.py leave too much of the GPU idle, None if they do not."""
    # H200, microseconds of the other kernel and of this one, by tiles. With squares of b: 64 tiles 26.0 and 33.5,
    # 96: 46.5 and 34.1, 128: 44.0 and 31.2, 160: 61.0 and 55.6, 192: 62.8 and 54.4, 200: 74.2 and 55.3. With a scale a
    # row: 24.9 and 37.8, 47.7 and 38.1, 49.0 and 38.7, 72.0 and 71.6, 72.0 and 72.6, 85.1 and 72.3.
    tiles, count = ceil_div(m, 2 * _BLOCK) * ceil_div(n, _BLOCK), processors().count
    if 10 * tiles < 7 * ceil_div(tiles, count) * count:
        return f"{tiles} tiles of 256 x 128 leave more than 3 in 10 of {count} multiprocessors idle"
    return None


def one_group(rows: int) -> Array:
    """The layout of one group of rows: its first row and its end, its first tile and their end, its tiles' group."""
    tiles = ceil_div(rows, _BLOCK)
    groups = lax.iota(jnp.int32, rows // _BLOCK + 1) >= tiles
    # Operations, no constant: jax partitions no function over devices that holds one.
    ends = [lax.full((1,), end, jnp.int32) for end in (0, rows, 0, tiles)]
    return lax.concatenate([*ends, groups.astype(jnp.int32)], 0)
