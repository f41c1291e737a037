"""What a quantization answers, and the request that its backends judge."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ....common.formats import E2M1, E4M3, E5M2, Element
from ....common.quantize_spec import QuantizeSpec

__all__ = ["Given", "QuantizeSpec", "Quantized", "Request", "jax_dtype"]

_DTYPES = {E4M3.name: jnp.float8_e4m3fn, E5M2.name: jnp.float8_e5m2, E2M1.name: jnp.float4_e2m1fn}


def jax_dtype(element: Element) -> jnp.dtype:
    """The dtype that holds an element's codes."""
    return jnp.dtype(_DTYPES[element.name])


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["multiplier", "amax", "amax_t", "random"],
    meta_fields=["over"],
)
@dataclass(frozen=True)
class Given:
    """What a quantization may be given beside the matrix: see `quantize`."""

    multiplier: Array | None = None
    amax: Array | None = None
    amax_t: Array | None = None
    random: tuple[Array, Array | None] | None = None
    over: tuple[str, ...] = ()


class Quantized(NamedTuple):
    """The matrix [M, K] in narrow codes; None where a direction was not asked for.

    Codes have the axes of what was quantized, [*M, *K] and [*K, *M].

    codes    [M, K];   scale    how `Operand` describes it for [M, K]
    codes_t  [K, M];   scale_t  the same for the transposed matrix [K, M]
    amax     float32 [1]: FLOAT8 and NVFP4, the absolute maximum that the row direction was scaled by
    amax_t   float32 [1]: NVFP4, the same for the column direction, after the Hadamard transform if any
    """

    codes: Array | None = None
    scale: Array | None = None
    codes_t: Array | None = None
    scale_t: Array | None = None
    amax: Array | None = None
    amax_t: Array | None = None

    def with_axes(self, shape: tuple[int, ...], axis: int) -> Quantized:
        """The same with codes of an array of that shape, whose columns begin at axis."""
        codes_t = None if self.codes_t is None else self.codes_t.reshape(*shape[axis:], *shape[:axis])
        return self._replace(codes=None if self.codes is None else self.codes.reshape(shape), codes_t=codes_t)


@dataclass(frozen=True)
class Request:
    """What a backend may decide on: the spec, the matrix's shape and dtype, and the platform; never its values.

    axis    where the columns of the array begin, whose rows and columns may be several axes each
    """

    spec: QuantizeSpec
    shape: tuple[int, int]
    dtype: jnp.dtype
    platform: str
    multiplier_given: bool = False
    axis: int = 1
