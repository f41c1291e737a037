"""FP8 code products with our kernels, as a primitive: how devices share it, which kernel runs, and both backends.

triton: the kernels in common/kernels/grouped_gemm.py, with one row group. XLA has no form for block scales, and takes
long to compile one scale per tensor without its flag.

gluon: the kernel in common/kernels/block_product.py for block scales, on Hopper.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ....common.dispatch import Backend
from ....common.formats import BLOCK_1D, BLOCK_2D, FLOAT8, ceil_div
from ....common.kernels.launch import gluon_missing
from ...runtime.platform import hardware, processors
from ..kernels import Kernel
from ..launching import platform_failure, run
from ..operand import Operand
from ..partitioning import ShardingRule, extent
from ..several_axes import call_on_axes
from .float8 import is_triton_off, warn_of_the_flag
from .request import GemmRequest

_BLOCK = 128
_RESULTS = (jnp.bfloat16, jnp.float16, jnp.float32)
_BLOCK_FORMATS = ((BLOCK_1D, BLOCK_2D), (BLOCK_1D, BLOCK_1D))


def multiply_codes(
    a: Operand, b: Operand, dtype: jnp.dtype, exact: bool, by_groups: bool = False
) -> Array:
    """Compute a [*M, *K] @ b [*N, *K].T in dtype; by_groups: see `CodesProduct`."""
    assert a.scale is not None and b.scale is not None
    scales, blocks = (a.scale, b.scale), None
    if a.format == BLOCK_1D:
        blocks = 1 if b.format == BLOCK_1D else _BLOCK
        scales = (a.scale.T, b.scale.T if blocks == 1 else b.scale)
    kernel = CodesProduct(dtype, exact, blocks, b.rows, a.depth, by_groups)
    counts = {"m": a.axis, "n": b.axis, "k": a.codes.ndim - a.axis}
    out = call_on_axes(kernel, counts, a.codes, b.codes, *scales)[0]
    return out.reshape(*a.codes.shape[: a.axis], *b.codes.shape[: b.axis])


@dataclass(frozen=True)
class CodesProduct(Kernel):
    """Multiply FP8 codes with float32 block scales: out [M, N] = a [M, K] @ b [N, K].T.

    Operands: codes of a and b, scales of a and b.

    Scales are [1] and [1]; or [ceil(K/128), M] with [ceil(N/128), ceil(K/128)]; or [ceil(K/128), M] with
    [ceil(K/128), N].

    Attributes:
        dtype: dtype of the product.
        exact: With one scale per tensor: whether partial sums are promoted to float32 every 128 elements.
        blocks: Rows of b that share a scale, 128 or 1; None for one scale per tensor.
        n: Rows of b in the full product.
        k: Contracted elements in the full product.
        by_groups: Whether the kernel in block_product.py runs, whose warps work in groups, if a device's part fits it.
    """

    dtype: jnp.dtype
    exact: bool
    blocks: int | None
    n: int
    k: int
    by_groups: bool = False

    @property
    def rule(self) -> ShardingRule:
        if self.blocks is None:
            n, k = extent("n", self.n, 1), extent("k", self.k, 1)
            scales = "p, q"
        else:
            n, k = extent("n", self.n, self.blocks), extent("k", self.k, _BLOCK)
            scale_b = f"{k.blocks} {n.whole}" if self.blocks == 1 else f"{n.blocks} {k.blocks}"
            scales = f"{k.blocks} m, {scale_b}"
        text = f"m {k.whole}, {n.whole} {k.whole}, {scales} -> m {n.whole}"
        return ShardingRule.from_extents(text, n, k, led_by_results=True, summed=(0,))

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        return (jax.ShapeDtypeStruct((operands[0].shape[0], operands[1].shape[0]), self.dtype),)

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        (m, k), n = arrays[0].shape, arrays[1].shape[0]
        if not self.by_groups or (unfit(m, n, k) or idle(m, n)) is not None:
            return (self._run_as_one_group(*arrays),)
        from ....common.kernels.block_product import product

        launch = product(
            m, n, k, self.dtype.name, by_row=self.blocks == 1, processors=processors().count
        )
        (out,) = run(launch, arrays)
        assert out is not None
        return (out,)

    def _run_as_one_group(self, a: Array, b: Array, scale_a: Array, scale_b: Array) -> Array:
        """Run the grouped_gemm.py kernels on one row group."""
        from ....common.kernels import grouped_gemm as kernels

        (m, k), n = a.shape, b.shape[0]
        machine = {
            "shared_memory": processors().shared_memory,
            "hopper": hardware().has("hopper instructions"),
        }
        if self.blocks == 1:
            # Both operands have scales per row: the kernel for weight gradients.
            padding = ((0, 0), (0, -k % _BLOCK))
            a, b = (x if k % _BLOCK == 0 else jnp.pad(x, padding) for x in (a, b))
            launch = kernels.product_of_columns(m, n, 1, scaling=kernels.BLOCK_SCALES, **machine)
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
                **machine,
            )
            inputs = [a, b, None, scale_a, scale_b, None, one_group(m)]
            (out,) = run(launch, inputs, [jax.ShapeDtypeStruct((m, n), self.dtype)])
        assert out is not None
        return out.reshape(m, n)


def unfit(m: int, n: int, k: int) -> str | None:
    """Reason why the kernel in block_product.py does not support these extents, or None."""
    if n % 16 or k % 16:
        return f"N={n} or K={k} is not a multiple of 16"
    if m % 4:
        return f"M={m} is not a multiple of 4: the copy engine fetches scales from multiples of 16 bytes"
    if max(m, n) * ceil_div(k, _BLOCK) >= 1 << 31:
        return f"{max(m, n)} x {ceil_div(k, _BLOCK)} scales are more than 2^31"
    return None


def idle(m: int, n: int) -> str | None:
    """Reason why the tiles in block_product.py leave too much of the GPU idle, or None."""
    # H200, microseconds for the other kernel and for this kernel, by tiles. With square b blocks: 64 tiles 26.0 and
    # 33.5, 96: 46.5 and 34.1, 128: 44.0 and 31.2, 160: 61.0 and 55.6, 192: 62.8 and 54.4, 200: 74.2 and 55.3. With
    # scales per row: 24.9 and 37.8, 47.7 and 38.1, 49.0 and 38.7, 72.0 and 71.6, 72.0 and 72.6, 85.1 and 72.3.
    tiles, count = ceil_div(m, 2 * _BLOCK) * ceil_div(n, _BLOCK), processors().count
    if 10 * tiles < 7 * ceil_div(tiles, count) * count:
        return f"{tiles} tiles of 256 x 128 leave more than 3 in 10 of {count} multiprocessors idle"
    return None


def one_group(rows: int) -> Array:
    """Build a one-group layout: its first row and end, its first tile and end, and each tile's group."""
    tiles = ceil_div(rows, _BLOCK)
    groups = lax.iota(jnp.int32, rows // _BLOCK + 1) >= tiles
    # Operations instead of a constant: JAX does not partition a function that contains one.
    ends = [lax.full((1,), end, jnp.int32) for end in (0, rows, 0, tiles)]
    return lax.concatenate([*ends, groups.astype(jnp.int32)], 0)


def unsupported_reason(request: GemmRequest) -> str | None:
    """Return why the backend does not support the request, or None."""
    if (reason := platform_failure(request.platform, "GemmPrimitive")) is not None:
        return reason
    if (reason := request.hardware.lacks("fp8 products")) is not None:
        return reason
    formats = (request.a_format, request.b_format)
    if None in formats:
        return "an operand is not quantized"
    if formats != (FLOAT8, FLOAT8) and formats not in _BLOCK_FORMATS:
        return "it takes one scale per tensor, or 1x128 blocks times 128x128 or 1x128 blocks"
    if formats == (FLOAT8, FLOAT8) and is_triton_off():
        return "one scale per tensor, which XLA hands to cuBLASLt"
    if request.n % 16 or request.k % 16:
        return f"N={request.n} or K={request.k} is not a multiple of 16"
    if 0 in (request.m, request.n, request.k):
        return "a product without elements"
    if request.dtype not in _RESULTS:
        return f"a result in {request.dtype}; supported: bfloat16, float16 and float32"
    return None


def bind(request: GemmRequest) -> Callable[..., Array]:
    if request.a_format == FLOAT8:
        warn_of_the_flag(request)
    return multiply_codes


TRITON = Backend[GemmRequest]("triton", unsupported_reason=unsupported_reason, bind=bind)


def gluon_unsupported_reason(request: GemmRequest) -> str | None:
    """Return why the Gluon kernel does not support the request, or None."""
    if (reason := platform_failure(request.platform, "GemmPrimitive")) is not None:
        return reason
    if (reason := gluon_missing(request.hardware)) is not None:
        return reason
    if (request.a_format, request.b_format) not in _BLOCK_FORMATS:
        return "it takes 1x128 blocks times 128x128 or 1x128 blocks"
    if 0 in (request.m, request.n, request.k):
        return "a product without elements"
    if (reason := unfit(request.m, request.n, request.k) or idle(request.m, request.n)) is not None:
        return reason
    if request.dtype not in _RESULTS:
        return f"a result in {request.dtype}; supported: bfloat16, float16 and float32"
    return None


# One object for all requests: equal functions are traced once.
_RUN_GLUON = functools.partial(multiply_codes, by_groups=True)
GLUON = Backend[GemmRequest](
    "gluon", unsupported_reason=gluon_unsupported_reason, bind=lambda request: _RUN_GLUON
)
