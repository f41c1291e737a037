"""E8M0: a power of two 2^(e - 127) in one byte, the scale of OCP Microscaling Formats (MX) 1.0."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from .. import exact

NAN = 0xFF
LARGEST = 0xFE
_HALF_LEAST_NORMAL = 0x00400000  # float32 bits of 2^-127, the least scale


def e8m0_from_float(v: Array) -> Array:
    """The least exponent byte e (int32) with 2^(e - 127) >= v, for float32 v >= 0; NaN -> 255, above 2^127 -> 254."""
    bits = exact.bits_of(v)
    exponent = bits >> 23
    mantissa = bits & 0x007FFFFF
    above = jnp.where(exponent == 0, mantissa > _HALF_LEAST_NORMAL, mantissa != 0)
    rounded = jnp.minimum(exponent + above.astype(jnp.int32), LARGEST)
    return jnp.where(bits > exact.INFINITY, NAN, rounded)


def times_power(values: Array, exponent: Array) -> Array:
    """values * 2^(exponent - 127) for exponent int32 in [0, 255]; 255 -> NaN.

    2^-127 is subnormal, and XLA on a CPU takes it for zero: halves of values * 2^-126 instead.
    """
    bits = jnp.where(exponent == NAN, exact.NAN, jnp.maximum(exponent, 1) << 23)
    product = values * exact.float_of(bits)
    return jnp.where(exponent == 0, product * 0.5, product)


def to_bytes(exponent: Array) -> Array:
    """Exponents int32 in [0, 255] as float8_e8m0fnu."""
    return lax.bitcast_convert_type(exponent.astype(jnp.uint8), jnp.float8_e8m0fnu)


def from_bytes(scale: Array) -> Array:
    """float8_e8m0fnu as exponents int32."""
    return lax.bitcast_convert_type(scale, jnp.uint8).astype(jnp.int32)
