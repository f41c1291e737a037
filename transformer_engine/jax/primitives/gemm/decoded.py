"""Products of codes with block scales that no kernel multiplies: every device decodes its part of the codes.

The literal product, in the partitioner's hands: left to itself it would have devices exchange the float32 values that
the reference makes of codes, four times their bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ....common.dispatch import Backend
from ....common.formats import TensorFormat
from ..custom_calls import switched_off
from ..kernels import Kernel
from ..operand import Operand
from ..partitioning import Extent, extent
from ..several_axes import OverVmap, call_on_axes
from . import reference
from .request import GemmRequest


def refuses(request: GemmRequest) -> str | None:
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
class Product(Kernel):
    """(codes a [M, K], codes b [N, K], scales of a, scales of b, maxima [1] of those that have one) -> out [M, N]

    A kernel for the partitioner's sake alone. Scales are [M / r, K / c] and [N / r, K / c] of blocks r x c, exponents
    as bytes.
    shape    (M, N, K) of the whole, whose blocks are not cut
    """

    forms: tuple[TensorFormat, TensorFormat]
    shape: tuple[int, int, int]
    dtype: jnp.dtype
    led_by_results = True
    summed = (0,)

    @property
    def extents(self) -> tuple[Extent, Extent, Extent]:
        blocks = [form.block for form in self.forms]
        assert blocks[0] is not None and blocks[1] is not None
        (m, n, k), depth = self.shape, blocks[0][1]
        return extent("m", m, blocks[0][0]), extent("n", n, blocks[1][0]), extent("k", k, depth)

    @property
    def rule(self) -> str:
        m, n, k = self.extents
        maxima = [
            rows.whole if form.row_scaled else name
            for rows, name, form in zip((m, n), "pq", self.forms, strict=True)
            if form.levels
        ]
        takes = [
            f"{m.whole} {k.whole}",
            f"{n.whole} {k.whole}",
            f"{m.blocks} {k.blocks}",
            f"{n.blocks} {k.blocks}",
        ]
        return f"{', '.join((*takes, *maxima))} -> {m.whole} {n.whole}"

    @property
    def in_parts(self) -> Product:
        return replace(self, dtype=jnp.dtype(jnp.float32))

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        a, b, *_ = operands
        return (jax.ShapeDtypeStruct((a.shape[0], b.shape[0]), self.dtype),)

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        codes, scales, maxima = arrays[:2], arrays[2:4], iter(arrays[4:])
        operands = [
            Operand(c, _scales(s, form), next(maxima) if form.levels else None, form)
            for c, s, form in zip(codes, scales, self.forms, strict=True)
        ]
        return (reference.run(operands[0], operands[1], self.dtype, True),)

    def under_vmap(self, mapped: Sequence[bool]) -> tuple[Kernel, tuple[bool, ...]]:
        return OverVmap(self, tuple(mapped)), (True,)


def run(a: Operand, b: Operand, dtype: jnp.dtype, exact: bool) -> Array:
    """a [*M, *K] @ b [*N, *K].T in dtype, partial sums in float32 whatever exact says."""
    assert a.format is not None and b.format is not None and a.scale is not None and b.scale is not None
    kernel = Product((a.format, b.format), (a.rows, b.rows, a.depth), dtype)
    maxima = [one.amax for one in (a, b) if one.amax is not None]
    counts = {"m": a.axis, "n": b.axis, "k": a.codes.ndim - a.axis}
    arrays = (*map(_in_bytes, (a.codes, b.codes)), *map(_bytes, (a.scale, b.scale)), *maxima)
    (out,) = call_on_axes(kernel, counts, *arrays)
    return out.reshape(*a.codes.shape[: a.axis], *b.codes.shape[: b.axis])


def _in_bytes(codes: Array) -> Array:
    """Codes of four bits as E4M3, which has all their values: every library of collectives knows bytes."""
    if codes.dtype != jnp.float4_e2m1fn:
        return codes
    return codes.astype(jnp.float32).astype(jnp.float8_e4m3fn)


def _bytes(scale: Array) -> Array:
    """Scales as devices exchange them: exponents as bytes."""
    return lax.bitcast_convert_type(scale, jnp.uint8) if scale.dtype == jnp.float8_e8m0fnu else scale


def _scales(given: Array, form: TensorFormat) -> Array:
    """What `_bytes` was given."""
    return lax.bitcast_convert_type(given, jnp.float8_e8m0fnu) if form.scale == "e8m0" else given


BACKEND = Backend[GemmRequest]("decoded", refuses=refuses, bind=lambda request: run)
