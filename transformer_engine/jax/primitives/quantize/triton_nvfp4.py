"""NVFP4 by kernels: the maxima, then codes and scales of both directions in one launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ....common.formats import NVFP4, ceil_div
from ..kernels import Kernel, call
from ..launching import run
from ..partitioning import Extent, extent
from .format_row import PlannedCall
from .hadamard import GROUP
from .spec import Given, Quantized, QuantizeSpec, Request
from .triton_float8 import Maximum


@dataclass(frozen=True)
class TransformedMaximum(Kernel):
    """x [M, K] -> max|transform of x.T| [1]; rows: M, whose groups are not cut"""

    random_sign: bool
    rows: int
    maxed = (0,)

    @property
    def rule(self) -> str:
        return f"{extent('m', self.rows, GROUP).whole} k -> o"

    @property
    def sizes(self) -> dict[str, int]:
        return extent("m", self.rows, GROUP).sizes

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        return (jax.ShapeDtypeStruct((1,), jnp.float32),)

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        from ....common.kernels import nvfp4  # it imports triton

        rows, depth = arrays[0].shape
        (amax,) = run(nvfp4.transformed_maximum((rows, depth), self.random_sign), arrays)
        assert amax is not None
        return (amax,)


@dataclass(frozen=True)
class Blocks(Kernel):
    """(x [M, K], [amax], [amax_t], [random [M, K]], [random_t [K, M]]) -> [codes, scale], [codes_t, scale_t]

    Codes lie two to a byte, uint8 [M, K / 2]. shape: of the whole matrix, whose blocks are not cut.
    given   which of the four are
    """

    spec: QuantizeSpec
    shape: tuple[int, int]
    given: tuple[bool, bool, bool, bool]

    @property
    def _extents(self) -> tuple[Extent, Extent]:
        turned = self.spec.columnwise or self.spec.two_dimensional
        return extent("m", self.shape[0], GROUP if turned else 1), extent("k", self.shape[1], GROUP)

    @property
    def rule(self) -> str:
        m, k = self._extents
        matrix, turned = f"{m.whole} {k.whole}", f"{k.whole} {m.whole}"
        takes = [
            matrix,
            *(one for one, there in zip(("p", "q", matrix, turned), self.given, strict=True) if there),
        ]
        made = []
        if self.spec.rowwise:
            made += [f"{m.whole} {k.bytes}", f"{m.whole} {k.blocks}"]
        if self.spec.columnwise:
            made += [f"{k.whole} {m.bytes}", f"{k.whole} {m.blocks}"]
        return f"{', '.join(takes)} -> {', '.join(made)}"

    @property
    def sizes(self) -> dict[str, int]:
        m, k = self._extents
        return m.sizes | k.sizes

    @property
    def replicated(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        words = self.rule.replace(",", " ").split()
        return tuple(name for one in self._extents for name in one.replicated if name in words)

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        rows, depth = operands[0].shape
        made = []
        for r, c in ((rows, depth),) * self.spec.rowwise + ((depth, rows),) * self.spec.columnwise:
            made.append(jax.ShapeDtypeStruct((r, c // 2), jnp.uint8))
            made.append(jax.ShapeDtypeStruct((r, ceil_div(c, GROUP)), jnp.float8_e4m3fn))
        return tuple(made)

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        from ....common.kernels import nvfp4  # it imports triton

        spec, (x, *rest) = self.spec, arrays
        rows, depth = x.shape
        remaining = iter(rest)
        inputs = [next(remaining) if there else None for there in self.given]
        launch = nvfp4.blocks(
            (rows, depth), spec.rowwise, spec.columnwise, square=spec.two_dimensional, hadamard=spec.hadamard,
            random_sign=spec.random_sign,
        )  # fmt: skip
        return tuple(array for array in run(launch, [x, *inputs]) if array is not None)


def _unpacked(codes: Array | None) -> Array | None:
    """uint8 [R, C / 2], low half first -> float4_e2m1fn [R, C]."""
    if codes is None:
        return None
    halves = jnp.stack((codes & 15, codes >> 4), axis=-1).reshape(codes.shape[0], -1)
    return lax.bitcast_convert_type(halves.astype(jnp.uint4), jnp.float4_e2m1fn)


def plan(request: Request) -> PlannedCall:
    """The codes, scales and maxima of matrices, as one spec asks for them."""
    spec = request.spec
    assert spec.format == NVFP4

    def quantize(x: Array, given: Given) -> Quantized:
        amax, amax_t = _maxima(x, spec, given)
        random = given.random if spec.stochastic and given.random is not None else (None, None)
        columns = random[0].T if spec.transposes and random[0] is not None else random[1]
        # Of columns alone the kernel reads no number of the rows, and the reverse.
        used = (
            amax if spec.rowwise else None, amax_t if spec.columnwise else None,
            random[0] if spec.rowwise else None, columns if spec.columnwise else None,
        )  # fmt: skip
        kernel = Blocks(spec, request.shape, tuple(one is not None for one in used))  # pyright: ignore
        made = list(call(kernel, x, *(one for one in used if one is not None)))
        rows = (made.pop(0), made.pop(0)) if spec.rowwise else (None, None)
        turned = (made.pop(0), made.pop(0)) if spec.columnwise else (None, None)
        return Quantized(_unpacked(rows[0]), rows[1], _unpacked(turned[0]), turned[1], used[0], used[1])

    return quantize


def _maxima(x: Array, spec: QuantizeSpec, given: Given) -> tuple[Array | None, Array | None]:
    """float32 [1] of both directions, those given and those measured here."""
    amax, amax_t = given.amax, given.amax_t
    if amax is None and (spec.rowwise or not spec.hadamard):
        (amax,) = call(Maximum(), x)
    if not spec.columnwise or spec.transposes:
        return amax, amax
    if amax_t is None:
        amax_t = call(TransformedMaximum(spec.random_sign, x.shape[0]), x)[0] if spec.hadamard else amax
    return amax, amax_t
