"""Products of codes with block scales that no kernel supports: every device decodes its part of the codes.

The computation is that of the reference. The kernel exists for the partitioner, which would otherwise have devices
exchange the decoded float32 values, four times the bytes of the codes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ....common.dispatch import Backend
from ....common.formats import TensorFormat
from ..launching import switched_off
from ..operand import Operand
from ..partitioning import ShardingRule, extent
from ..several_axes import OperationsKernel, call_on_axes
from . import reference
from .request import GemmRequest


def unsupported_reason(request: GemmRequest) -> str | None:
    if request.platform != "cuda":
        return f"it needs a CUDA device, the program is for {request.platform}"
    if (reason := switched_off("GemmPrimitive")) is not None:
        return reason
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


@dataclass(frozen=True)
class DecodedProduct(OperationsKernel):
    """(codes a [M, K], codes b [N, K], scales of a, scales of b, maxima [1] of the formats that have one) -> out [M, N]

    Scales are [M / r, K / c] and [N / r, K / c] for blocks r x c, with E8M0 scales as bytes.

    Attributes:
        forms: Formats of a and b.
        shape: (M, N, K) of the whole product; shards contain whole blocks of it.
        dtype: dtype of the product.
    """

    forms: tuple[TensorFormat, TensorFormat]
    shape: tuple[int, int, int]
    dtype: jnp.dtype

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
        codes = [f"{m.whole} {k.whole}", f"{n.whole} {k.whole}"]
        scales = [f"{m.blocks} {k.blocks}", f"{n.blocks} {k.blocks}"]
        text = f"{', '.join((*codes, *scales, *maxima))} -> {m.whole} {n.whole}"
        return ShardingRule.of_extents(text, m, n, k, led_by_results=True, summed=(0,))

    @property
    def in_parts(self) -> DecodedProduct:
        return replace(self, dtype=jnp.dtype(jnp.float32))

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        a, b, *_ = operands
        return (jax.ShapeDtypeStruct((a.shape[0], b.shape[0]), self.dtype),)

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        codes, scales, maxima = arrays[:2], arrays[2:4], iter(arrays[4:])
        operands = []
        for c, s, form in zip(codes, scales, self.forms, strict=True):
            scale = lax.bitcast_convert_type(s, jnp.float8_e8m0fnu) if form.scale == "e8m0" else s
            operands.append(Operand(c, scale, next(maxima) if form.levels else None, form))
        return (reference.run(operands[0], operands[1], self.dtype, True),)


def run(a: Operand, b: Operand, dtype: jnp.dtype, exact: bool) -> Array:
    """Return a [*M, *K] @ b [*N, *K].T in dtype, with partial sums in float32 even if exact is False."""
    assert a.format is not None and b.format is not None
    kernel = DecodedProduct((a.format, b.format), (a.rows, b.rows, a.depth), dtype)
    codes, scales, maxima = [], [], []
    for operand in (a, b):
        assert operand.scale is not None
        # Libraries of collectives support bytes: E4M3 represents all E2M1 values, and E8M0 scales become bytes.
        four_bits = operand.codes.dtype == jnp.float4_e2m1fn
        codes.append(
            operand.codes.astype(jnp.float32).astype(jnp.float8_e4m3fn) if four_bits else operand.codes
        )
        exponents = operand.scale.dtype == jnp.float8_e8m0fnu
        scales.append(lax.bitcast_convert_type(operand.scale, jnp.uint8) if exponents else operand.scale)
        if operand.amax is not None:
            maxima.append(operand.amax)
    counts = {"m": a.axis, "n": b.axis, "k": a.codes.ndim - a.axis}
    (out,) = call_on_axes(kernel, counts, *codes, *scales, *maxima)
    return out.reshape(*a.codes.shape[: a.axis], *b.codes.shape[: b.axis])


BACKEND = Backend[GemmRequest]("decoded", unsupported_reason=unsupported_reason, bind=lambda request: run)
