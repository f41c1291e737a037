"""Arithmetic of float32 scales in integers: IEEE results, subnormal ones included, on every device.

XLA flushes subnormal float32 numbers to zero on a CPU, and divides with an error of two units on a GPU. Every bit of
the codes depends on the scales, so their arithmetic is done here. Operands are >= 0, infinite or NaN; arrays of scales
are small.

n and d below are mantissas in [2^23, 2^24): a value is n * 2^(e - 23).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

INFINITY = 0x7F800000
NAN = 0x7FC00000
_MANTISSA = 0x007FFFFF
_LEADING = 0x00800000


def bits_of(values: Array) -> Array:
    """Return the int32 bits of float32 values."""
    return lax.bitcast_convert_type(values, jnp.int32)


def float_of(bits: Array) -> Array:
    """Return the float32 values of int32 bits."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def bits_of_constant(value: float) -> int:
    """Return the int32 bits of a number rounded to float32."""
    return int(np.float32(value).view(np.int32))


def magnitude_bits(x: Array) -> Array:
    """Return the int32 bits of |x| as float32, exactly; ordered as the magnitudes, with NaN above infinity."""
    if x.dtype == jnp.bfloat16:
        # bfloat16 is float32 without its lower half; a conversion would flush subnormal values.
        return (lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.int32) & 0x7FFF) << 16
    return bits_of(x.astype(jnp.float32)) & 0x7FFFFFFF


def largest_over(amax: Array, axes: tuple[str, ...]) -> Array:
    """Return the maximum of float32 amaxes over manual mesh axes; NaN if one is NaN.

    Bits are compared, because a maximum of floats may drop NaN or subnormal values.
    """
    return float_of(lax.pmax(bits_of(amax), axes)) if axes else amax


def divide(numerator: Array | float, denominator: Array) -> Array:
    """Return numerator / denominator in float32, correctly rounded."""
    a, b = bits_of(jnp.asarray(numerator, jnp.float32)), bits_of(denominator)
    n, n_exponent = _normalized(a)
    d, d_exponent = _normalized(b)
    # 27 bits of the quotient: one in front of the point, then long division with digits of 8, 8, 8 and 2 bits.
    quotient = (n >= d).astype(jnp.uint32)
    rest = n - d * quotient
    for width in (8, 8, 8, 2):
        shifted = rest << width
        digit = shifted // d
        rest = shifted - digit * d
        quotient = (quotient << width) | digit
    result = _rounded(quotient, n_exponent - d_exponent, rest != 0)
    result = jnp.where((a == 0) | (b == INFINITY), 0, result)
    result = jnp.where((b == 0) | (a == INFINITY), INFINITY, result)
    undefined = (a > INFINITY) | (b > INFINITY) | ((a == 0) & (b == 0)) | ((a == INFINITY) & (b == INFINITY))
    return float_of(jnp.where(undefined, NAN, result))


def reciprocal(values: Array) -> Array:
    """Return 1 / values in float32, correctly rounded."""
    return divide(1.0, values)


def multiply(first: Array, second: Array | float) -> Array:
    """Return first * second in float32, correctly rounded."""
    a, b = bits_of(first), bits_of(jnp.asarray(second, jnp.float32))
    n, n_exponent = _normalized(a)
    d, d_exponent = _normalized(b)
    # 48 bits of the product from halves of 12 bits: high * 2^24 + low.
    n_high, n_low, d_high, d_low = n >> 12, n & 0xFFF, d >> 12, d & 0xFFF
    cross = n_high * d_low + n_low * d_high
    low = n_low * d_low + ((cross & 0xFFF) << 12)
    high = n_high * d_high + (cross >> 12) + (low >> 24)
    low = low & 0xFFFFFF
    result = _rounded((high << 3) | (low >> 21), n_exponent + d_exponent + 1, (low & 0x1FFFFF) != 0)
    result = jnp.where((a == 0) | (b == 0), 0, result)
    result = jnp.where((a == INFINITY) | (b == INFINITY), INFINITY, result)
    infinite_nothing = ((a == 0) & (b == INFINITY)) | ((a == INFINITY) & (b == 0))
    return float_of(jnp.where((a > INFINITY) | (b > INFINITY) | infinite_nothing, NAN, result))


# Compiled as one program also in eager mode, where it would take seconds operation by operation.
@jax.jit
def scaled(values: Array, scale: Array) -> Array:
    """Return values * scale, correct for subnormal scales too; a subnormal product may still become zero."""
    tiny = bits_of(scale) < bits_of_constant(2.0**-100)
    enlarged = jnp.where(tiny, multiply(scale, 2.0**24), scale)
    # Both factors vary, so that XLA cannot merge them into one, which would be subnormal again.
    return (values * jnp.where(tiny, jnp.float32(2.0**-24), jnp.float32(1.0))) * enlarged


def _normalized(bits: Array) -> tuple[Array, Array]:
    """Return mantissa (uint32 in [2^23, 2^24)) and exponent (int32) of positive finite float32 bits."""
    field = bits >> 23
    mantissa = bits & _MANTISSA
    missing = jnp.maximum(lax.clz(mantissa) - 8, 0)
    n = jnp.where(field == 0, mantissa << missing, mantissa | _LEADING)
    exponent = jnp.where(field == 0, -126 - missing, field - 127)
    # Zero has no leading bit; any mantissa will do, since its result is replaced.
    return jnp.where(n == 0, _LEADING, n).astype(jnp.uint32), exponent


def _rounded(q: Array, exponent: Array, inexact: Array) -> Array:
    """Return the float32 bits of q * 2^(exponent - 26), ties to even; q uint32 in [2^25, 2^27).

    Args:
        inexact: Whether nonzero bits follow the last bit of q.
    """
    small = q < (1 << 26)
    q = jnp.where(small, q << 1, q)
    field = exponent + 127 - small.astype(jnp.int32)
    shift = jnp.clip(3 + 1 - field, 3, 28).astype(jnp.uint32)
    q = q | inexact.astype(jnp.uint32)
    kept = q >> shift
    half = jnp.uint32(1) << (shift - 1)
    below = q & ((jnp.uint32(1) << shift) - 1)
    up = (below > half) | ((below == half) & ((kept & 1) == 1))
    kept = (kept + up.astype(jnp.uint32)).astype(jnp.int32)
    # A mantissa that rounds up to the next power of two carries into the exponent, which is right as it stands.
    bits = jnp.where(field >= 1, ((field - 1) << 23) + kept, kept)
    return jnp.where((field >= 255) | (bits >= INFINITY), INFINITY, bits)
