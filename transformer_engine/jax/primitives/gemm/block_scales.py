"""Code products with block scales, a [M, K] @ b [N, K].T, as primitives that devices share.

A primitive has the codes as operands. Without one, the partitioner would have devices exchange decoded float32 values,
four times the code bytes. `scaled_codes` and `decoded` contain the computations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from ....common.formats import TensorFormat
from ..kernels import Kernel
from ..operand import Operand
from ..partitioning import ShardingRule, extent
from ..quantize import pack_e2m1
from ..several_axes import call_on_axes
from .request import GemmRequest

Product = TypeVar("Product", bound="BlockScaledProduct")


@dataclass(frozen=True)
class BlockScaledProduct(Kernel):
    """Multiply block-scaled codes: out [M, N] = a [M, K] @ b [N, K].T.

    Operands: codes of a and b, scales of a and b, and maxima for formats with second-level scales.

    Scales are [M / r, K / c] and [N / r, K / c] for blocks r x c, one-byte scales as uint8. Maxima are float32 [1], or
    one per row. E2M1 codes are E4M3 values, or two in a byte, [M, K / 2], if `packs`.

    Attributes:
        forms: Formats of a and b.
        shape: (M, N, K) for the full product; each shard contains full blocks.
        dtype: dtype of the product.
    """

    forms: tuple[TensorFormat, TensorFormat]
    shape: tuple[int, int, int]
    dtype: jnp.dtype

    packs = False

    def product(self, a: Operand, b: Operand) -> Array:
        """Compute out [M, N] from two operands, whose one-byte scales and packed codes are uint8."""
        raise NotImplementedError

    @property
    def rule(self) -> ShardingRule:
        blocks = [form.block for form in self.forms]
        assert blocks[0] is not None and blocks[1] is not None
        rows, columns, depth = self.shape
        m, n = extent("m", rows, blocks[0][0]), extent("n", columns, blocks[1][0])
        k = extent("k", depth, blocks[0][1])
        maxima = [
            matrix.whole if form.row_scaled else name
            for matrix, name, form in zip((m, n), "pq", self.forms, strict=True)
            if form.levels
        ]
        codes = [
            f"{matrix.whole} {k.bytes if self._packs(form) else k.whole}"
            for matrix, form in zip((m, n), self.forms, strict=True)
        ]
        scales = [f"{m.blocks} {k.blocks}", f"{n.blocks} {k.blocks}"]
        text = f"{', '.join((*codes, *scales, *maxima))} -> {m.whole} {n.whole}"
        return ShardingRule.from_extents(text, m, n, k, led_by_results=True, summed=(0,))

    def _packs(self, form: TensorFormat) -> bool:
        return self.packs and form.packing == 2

    @property
    def in_parts(self) -> BlockScaledProduct:
        return replace(self, dtype=jnp.dtype(jnp.float32))

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        a, b, *_ = operands
        return (jax.ShapeDtypeStruct((a.shape[0], b.shape[0]), self.dtype),)

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        codes, scales, maxima = arrays[:2], arrays[2:4], iter(arrays[4:])
        operands = [
            Operand(c, s, next(maxima) if form.levels else None, form)
            for c, s, form in zip(codes, scales, self.forms, strict=True)
        ]
        return (self.product(*operands),)


def multiply_codes(
    kernel: type[Product], a: Operand, b: Operand, dtype: jnp.dtype, **options: Any
) -> Array:
    """Compute a [*M, *K] @ b [*N, *K].T in dtype by a primitive."""
    assert a.format is not None and b.format is not None
    product = kernel((a.format, b.format), (a.rows, b.rows, a.depth), dtype, **options)
    packs = [product._packs(form) for form in product.forms]
    if any(packs) and any(x.codes.shape[-1] % 2 for x in (a, b)):
        # A byte contains two codes along one axis.
        a, b = (
            replace(x, codes=x.codes.reshape(*x.codes.shape[: x.axis], x.depth)) if packed else x
            for x, packed in zip((a, b), packs, strict=True)
        )
    codes, scales, maxima = [], [], []
    for operand, packed in zip((a, b), packs, strict=True):
        assert operand.scale is not None
        codes.append(pack_e2m1(operand.codes) if packed else _widen_codes(operand.codes))
        one_byte = operand.scale.dtype.itemsize == 1
        scales.append(
            lax.bitcast_convert_type(operand.scale, jnp.uint8) if one_byte else operand.scale
        )
        if operand.amax is not None:
            maxima.append(operand.amax)
    contracted = max(x.codes.ndim - x.axis for x in (a, b))
    counts = {
        "m": a.axis,
        "n": b.axis,
        "k": contracted,
        "khalf": contracted,
    }  # khalf: the bytes of a block alone
    (out,) = call_on_axes(product, counts, *codes, *scales, *maxima)
    return out.reshape(*a.codes.shape[: a.axis], *b.codes.shape[: b.axis])


def _widen_codes(codes: Array) -> Array:
    """Convert E2M1 codes to E4M3, which represents all their values: collective libraries support bytes."""
    if codes.dtype != jnp.float4_e2m1fn:
        return codes
    return codes.astype(jnp.float32).astype(jnp.float8_e4m3fn)


def with_scale_dtypes(operand: Operand) -> Operand:
    """Restore the floating-point scale dtype in a `BlockScaledProduct.product` operand."""
    assert operand.format is not None and operand.scale is not None
    dtype = {"e8m0": jnp.float8_e8m0fnu, "e4m3": jnp.float8_e4m3fn}.get(operand.format.scale)
    if dtype is None:
        return operand
    return replace(operand, scale=lax.bitcast_convert_type(operand.scale, dtype))


def unsupported_reason(request: GemmRequest) -> str | None:
    """Reason why two operands do not multiply block by block, or None."""
    depths = []
    for form in (request.a_format, request.b_format):
        if form is None or form.block is None:
            return "an operand has no block scales"
        depths.append(form.block[1])
    if depths[0] != depths[1]:
        return f"scales of {depths[0]} and of {depths[1]} contracted elements"
    if 0 in (request.m, request.n, request.k):
        return "a product without elements"
    return None
