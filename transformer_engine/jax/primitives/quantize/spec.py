"""Records of quantization: request, inputs, results, fused output casts, and the format table's rows."""

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
    "FormatRow",
    "OutputCast",
    "QuantizeInputs",
    "QuantizeRequest",
    "QuantizeSpec",
    "Quantized",
    "jax_dtype",
]

_DTYPES = {E4M3.name: jnp.float8_e4m3fn, E5M2.name: jnp.float8_e5m2, E2M1.name: jnp.float4_e2m1fn}


def jax_dtype(element: Element) -> jnp.dtype:
    """Dtype for an element's codes."""
    return jnp.dtype(_DTYPES[element.name])


class OutputCast(NamedTuple):
    """How an operation quantizes its own result.

    Attributes:
        spec: How the result is quantized.
        multiplier: FLOAT8: multiplier [1], where 0 is read as 1. None: derived from the absolute maximum.
    """

    spec: QuantizeSpec
    multiplier: Array | None = None


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["multiplier", "amax", "amax_t", "random"],
    meta_fields=["mesh_axes"],
)
@dataclass(frozen=True)
class QuantizeInputs:
    """Optional inputs of a quantization; None where the caller passes no value.

    Attributes:
        multiplier: FLOAT8: multiplier [1] of the values before rounding, where 0 is read as 1.
        amax: FLOAT8 and NVFP4: absolute maximum from which the rowwise scale is derived.
        amax_t: NVFP4: the same for the columnwise scale.
        random: Random numbers for stochastic rounding of the codes, and of the transposed codes if requested.
        mesh_axes: Manual mesh axes over which the matrix is sharded; measured maxima are reduced over them.
    """

    multiplier: Array | None = None
    amax: Array | None = None
    amax_t: Array | None = None
    random: tuple[Array, Array | None] | None = None
    mesh_axes: tuple[str, ...] = ()


class Quantized(NamedTuple):
    """Codes and scales for a matrix [M, K].

    The fields of a direction that was not requested are None. M and K may be several axes each: codes have the axes of
    the quantized array, [*M, *K] and [*K, *M].

    Attributes:
        codes: Codes [M, K].
        scale: Scales for [M, K]; see `Operand`.
        codes_t: Transposed codes [K, M].
        scale_t: Scales for [K, M].
        amax: FLOAT8 and NVFP4: absolute maximum from which the rowwise scale was derived, float32 [1], or [M] with
            scales per row.
        amax_t: NVFP4: absolute maximum of the columnwise direction, after the Hadamard transform if any.
    """

    codes: Array | None = None
    scale: Array | None = None
    codes_t: Array | None = None
    scale_t: Array | None = None
    amax: Array | None = None
    amax_t: Array | None = None

    def reshaped(self, shape: tuple[int, ...], axis: int) -> Quantized:
        """Reshape `codes` to an array's shape, whose columns begin at axis, and `codes_t` to its transpose."""
        codes_t = (
            None if self.codes_t is None else self.codes_t.reshape(*shape[axis:], *shape[:axis])
        )
        return self._replace(
            codes=None if self.codes is None else self.codes.reshape(shape), codes_t=codes_t
        )


@dataclass(frozen=True)
class QuantizeRequest:
    """Quantization properties that determine the backend.

    Attributes:
        spec: How the matrix is quantized.
        shape: Matrix shape.
        dtype: Matrix dtype.
        platform: Platform of the program, "cpu" or "cuda".
        multiplier_given: Whether the caller passes a multiplier.
        axis: First column axis of the array, whose rows and columns may be several axes each.
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
    """Implementation of one format; a row of the table `FORMATS`.

    Attributes:
        format: Format description.
        quantize: Reference implementation in float32 on any device: (x [*M, *K], spec, inputs, first axis of K) ->
            codes and scales. With one scale for all elements, the codes have x's shape in both directions.
        dequantize: (operand, scales broadcast to the operand's axes) -> values [*rows, *K] in float32.
        quantize_by_kernels: Triton kernels: (x, inputs, request) -> codes and scales.
        check_shape: (M, K, spec); raises ValueError if the shape is unsupported. None supports all shapes.
    """

    format: TensorFormat
    quantize: Callable[[Array, QuantizeSpec, QuantizeInputs, int], Quantized]
    dequantize: Callable[[Operand, Array], Array]
    quantize_by_kernels: Callable[[Array, QuantizeInputs, QuantizeRequest], Quantized]
    check_shape: Callable[[int, int, QuantizeSpec], None] | None = None
