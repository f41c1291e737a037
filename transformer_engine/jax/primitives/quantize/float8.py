"""codes [R, K] = saturate(x * multiplier), with one float32 multiplier for the whole matrix."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from ....common.formats import FLOAT32_MAX, Element
from .. import exact
from .spec import jax_dtype

_NAN = 0x7F  # code of NaN, E4M3 and E5M2
_SIGN_AND_EXPONENT = -(1 << 23)  # int32 of 0xFF800000: every bit of a float32 but its mantissa


def absolute_maximum(x: Array) -> Array:
    """max|x| as float32 [1]; 0 of an empty array, NaN if any element is NaN."""
    return exact.float_of(jnp.max(exact.magnitude_bits(x), initial=0).reshape(1))


def row_maxima(x: Array, axis: int) -> Array:
    """max|x| of every row of x [*rows, *columns] as float32 [prod(rows)]; NaN where a row has a NaN."""
    bits = jnp.max(exact.magnitude_bits(x), axis=tuple(range(axis, x.ndim)), initial=0)
    return exact.float_of(bits.reshape(-1))


def scale_from_amax(
    amax: Array,
    maximum: float,
    *,
    power_of_two: bool = False,
    epsilon: float = 0.0,
    value_for_inf: float = FLOAT32_MAX,
) -> Array:
    """scale = maximum / max(amax, epsilon) in float32; 1 where that amax is 0, infinite or NaN.

    An infinite quotient becomes value_for_inf; power_of_two rounds down by clearing the mantissa.
    """
    bits = exact.bits_of(amax.astype(jnp.float32))
    if epsilon > 0.0:
        bits = jnp.maximum(bits, exact.bits_of_constant(epsilon))
    scale = exact.bits_of(exact.divide(maximum, exact.float_of(bits)))
    scale = jnp.where(scale == exact.INFINITY, exact.bits_of_constant(value_for_inf), scale)
    if power_of_two:
        scale = scale & _SIGN_AND_EXPONENT
    usable = (bits > 0) & (bits < exact.INFINITY)
    return exact.float_of(jnp.where(usable, scale, exact.bits_of_constant(1.0)))


def value_for_inf(dtype: jnp.dtype) -> float:
    """What the scale of values in dtype becomes where its quotient overflows: their greatest number, or float32's."""
    return min(float(jnp.finfo(dtype).max), FLOAT32_MAX)


def given_multiplier(multiplier: Array) -> Array:
    """The multipliers that a caller gives, as float32; a 0, JAX's gradient of a state that was not read, is 1."""
    multiplier = multiplier.astype(jnp.float32)
    # By their bits: a comparison of values takes subnormal ones for 0 on a CPU.
    return jnp.where(exact.magnitude_bits(multiplier) == 0, 1.0, multiplier)


def cast(x: Array, element: Element) -> Array:
    """The nearest codes of float32 x, ties to even; infinity as the maximum, NaN as 0x7F whatever its sign.

    0x7F is NVIDIA's canonical NaN of both formats, which the conversion instruction of the kernels produces.
    """
    dtype = jax_dtype(element)
    # The conversion alone makes NaN (E4M3) or infinity (E5M2) of values beyond the maximum, and NaNs of either sign.
    codes = jnp.clip(x, -element.maximum, element.maximum).astype(dtype)
    # As bytes: XLA selects between float8 values by way of another format, which changes NaNs.
    codes = jnp.where(jnp.isnan(x), jnp.uint8(_NAN), lax.bitcast_convert_type(codes, jnp.uint8))
    codes = lax.bitcast_convert_type(codes, dtype)
    # XLA for a GPU removes float32 -> float8 -> float32: without a barrier, readers in the same program would get
    # values that were never rounded.
    return lax.platform_dependent(codes, cpu=_unchanged, default=lax.optimization_barrier)


def _unchanged(codes: Array) -> Array:
    return codes


def encode(x: Array, element: Element, multiplier: Array) -> Array:
    """codes [R, K] = cast(float32(x) * multiplier)."""
    multiplier = lax.expand_dims(multiplier, range(x.ndim - multiplier.ndim))
    return cast(x.astype(jnp.float32) * multiplier, element)
