"""Quantization records: request, inputs, results, the cast of an operation's own result, and format rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ....common.formats import E2M1, E4M3, E5M2, Element, TensorFormat
from ....common.quantize_spec import QuantizeSpec
from ..operand import Operand

__all__ = [
    "Cast",
    "FormatRow",
    "QuantizeInputs",
    "QuantizeSpec",
    "Quantized",
    "Request",
    "jax_dtype",
]

_DTYPES = {E4M3.name: jnp.float8_e4m3fn, E5M2.name: jnp.float8_e5m2, E2M1.name: jnp.float4_e2m1fn}


def jax_dtype(element: Element) -> jnp.dtype:
    """Dtype for an element's codes."""
    return jnp.dtype(_DTYPES[element.name])


class Cast(NamedTuple):
    """How an operation quantizes its own result.

    Attributes:
        spec: Code format.
        multiplier: FLOAT8: multiplier [1], where 0 is read as 1; None derives it from the absolute maximum.
    """

    spec: QuantizeSpec
    multiplier: Array | None = None


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["multiplier", "amax", "amax_t", "random"],
    meta_fields=["over"],
)
@dataclass(frozen=True)
class QuantizeInputs:
    """Optional quantization inputs; see `quantize`."""

    multiplier: Array | None = None
    amax: Array | None = None
    amax_t: Array | None = None
    random: tuple[Array, Array | None] | None = None
    over: tuple[str, ...] = ()


class Quantized(NamedTuple):
    """Codes and scales for a matrix [M, K]; None for a direction that was not requested.

    Codes have the axes of the quantized array, [*M, *K] and [*K, *M].

    Attributes:
        codes: Codes [M, K].
        scale: Scales for [M, K]; see `Operand`.
        codes_t: Transposed codes [K, M].
        scale_t: Scales for [K, M].
        amax: FLOAT8 and NVFP4: the absolute maximum, float32 [1], that scaled the row direction.
        amax_t: NVFP4: the same for the column direction, after the Hadamard transform if any.
    """

    codes: Array | None = None
    scale: Array | None = None
    codes_t: Array | None = None
    scale_t: Array | None = None
    amax: Array | None = None
    amax_t: Array | None = None

    def with_axes(self, shape: tuple[int, ...], axis: int) -> Quantized:
        """Reshape the codes for an array with this shape, whose columns begin at axis."""
        codes_t = (
            None if self.codes_t is None else self.codes_t.reshape(*shape[axis:], *shape[:axis])
        )
        return self._replace(
            codes=None if self.codes is None else self.codes.reshape(shape), codes_t=codes_t
        )


@dataclass(frozen=True)
class Request:
    """Quantization properties that determine the backend.

    Attributes:
        spec: Code format.
        shape: Matrix shape.
        dtype: Matrix dtype.
        platform: Platform of the program, "cpu" or "cuda".
        multiplier_given: Whether the caller passes a multiplier.
        axis: Where the columns of the array begin; its rows and columns may be several axes each.
        maxima_per_tile: Whether the caller passes one maximum per NVFP4 tile.
    """

    spec: QuantizeSpec
    shape: tuple[int, int]
    dtype: jnp.dtype
    platform: str
    multiplier_given: bool = False
    axis: int = 1
    maxima_per_tile: bool = False


@dataclass(frozen=True)
class FormatRow:
    """The maths of one format.

    Attributes:
        format: Format description.
        quantize: Reference: codes for x [*M, *K], whose K begins at an axis, by float32 operations on any device. With
            one scale for all elements, x has any shape and the codes have the same shape, whatever the direction.
        dequantize: (operand, its scales along its axes) -> values [*rows, *K] in float32.
        quantize_by_kernels: Computes a request for an array with kernels.
        check: (rows, depth, spec) raises ValueError if the shape is unsupported; None supports all shapes.
    """

    format: TensorFormat
    quantize: Callable[[Array, QuantizeSpec, QuantizeInputs, int], Quantized]
    dequantize: Callable[[Operand, Array], Array]
    quantize_by_kernels: Callable[[Array, QuantizeInputs, Request], Quantized]
    check: Callable[[int, int, QuantizeSpec], None] | None = None
