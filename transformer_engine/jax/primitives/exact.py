"""Integer arithmetic on float32 scales: IEEE results, subnormal ones included, on every device.

XLA flushes subnormal float32 numbers to zero on a CPU, and divides with a two-unit error on a GPU. Every code bit
depends on the scales, so their arithmetic is done here. Operands are >= 0, infinite or NaN; scale arrays are small.

n and d below are mantissas in [2^23, 2^24).
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


def float_bits(values: Array) -> Array:
    """View float32 values as int32 bits."""
    return lax.bitcast_convert_type(values, jnp.int32)


def bits_to_float(bits: Array) -> Array:
    """View int32 bits as float32 values."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def bits_of_constant(value: float) -> int:
    """Round a number to float32 and view it as int32 bits."""
    return int(np.float32(value).view(np.int32))


def magnitude_bits(x: Array) -> Array:
    """Compute |x| as float32 in int32 bits, exactly; ordered as the magnitudes, with NaN above infinity."""
    if x.dtype == jnp.bfloat16:
        # bfloat16 is float32 without its lower half; a conversion would flush subnormal values.
        return (lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.int32) & 0x7FFF) << 16
    return float_bits(x.astype(jnp.float32)) & 0x7FFFFFFF


def maximum_over_axes(amax: Array, axes: tuple[str, ...]) -> Array:
    """Reduce float32 amaxes to their maximum over manual mesh axes; NaN if one is NaN.

    Bits are compared, because a floating-point maximum may drop NaN or subnormal values.
    """
    return bits_to_float(lax.pmax(float_bits(amax), axes)) if axes else amax


@jax.jit  # the trace with about 100 operations is cached for each shape
def divide(numerator: Array | float, denominator: Array) -> Array:
    """Compute numerator / denominator in float32, correctly rounded."""
    a, b = float_bits(jnp.asarray(numerator, jnp.float32)), float_bits(denominator)
    n, n_field = _normalized(a)
    d, d_field = _normalized(b)
    below_one = (n < d).astype(jnp.int32)
    n = n << below_one.astype(jnp.uint32)
    q = _quotient(n, d, n.astype(jnp.float32) / d.astype(jnp.float32))
    result = _round_bits(q, n_field - d_field + 127 - below_one)
    result = jnp.where((a == 0) | (b == INFINITY), 0, result)
    result = jnp.where((b == 0) | (a == INFINITY), INFINITY, result)
    undefined = (jnp.maximum(a, b) > INFINITY) | (jnp.minimum(a, b) == INFINITY) | ((a | b) == 0)
    return bits_to_float(jnp.where(undefined, NAN, result))


def reciprocal(values: Array) -> Array:
    """Compute 1 / values in float32, correctly rounded."""
    return divide(1.0, values)


@jax.jit
def multiply(first: Array, second: Array | float) -> Array:
    """Compute first * second in float32, correctly rounded."""
    a, b = float_bits(first), float_bits(jnp.asarray(second, jnp.float32))
    n, n_field = _normalized(a)
    d, d_field = _normalized(b)
    # 48-bit product from 12-bit halves: high * 2^24 + low.
    n_high, n_low, d_high, d_low = n >> 12, n & 0xFFF, d >> 12, d & 0xFFF
    cross = n_high * d_low + n_low * d_high
    low = n_low * d_low + ((cross & 0xFFF) << 12)
    high = n_high * d_high + (cross >> 12) + (low >> 24)
    two_or_more = high >> 23
    # Product bits 47 to 22, or 46 to 21 for a product below two.
    last = 21 + two_or_more
    q = (high << (24 - last)) | ((low & 0xFFFFFF) >> last)
    q = q | ((low & ((jnp.uint32(1) << last) - 1)) != 0).astype(jnp.uint32)
    result = _round_bits(q, n_field + d_field - 127 + two_or_more.astype(jnp.int32))
    result = jnp.where((a == 0) | (b == 0), 0, result)
    largest = jnp.maximum(a, b)
    result = jnp.where(largest == INFINITY, INFINITY, result)
    undefined = (largest > INFINITY) | ((largest == INFINITY) & (jnp.minimum(a, b) == 0))
    return bits_to_float(jnp.where(undefined, NAN, result))


# Compiled as one program also in eager mode, where it would take seconds operation by operation.
@jax.jit
def scaled(values: Array, scale: Array) -> Array:
    """Compute values * scale, correct for subnormal scales too; a subnormal product may still become zero."""
    tiny = float_bits(scale) < bits_of_constant(2.0**-100)
    enlarged = jnp.where(tiny, multiply(scale, 2.0**24), scale)
    # Both factors vary, so that XLA cannot merge them into one, which would be subnormal again.
    return (values * jnp.where(tiny, jnp.float32(2.0**-24), jnp.float32(1.0))) * enlarged


def _normalized(bits: Array) -> tuple[Array, Array]:
    """Split positive finite float32 bits into the mantissa n, uint32, and the exponent field, int32.

    The value is n * 2^(field - 127 - 23). The field of a subnormal value is 0 or less, as if more exponents existed.
    Zero has no leading bit. It gets the mantissa for one, because its result is replaced.
    """
    missing = jnp.maximum(lax.clz(bits) - 8, 0)
    n = ((bits << missing) & _MANTISSA) | _LEADING
    return n.astype(jnp.uint32), jnp.maximum(bits >> 23, 1) - missing


def _quotient(n: Array, d: Array, estimate: Array) -> Array:
    """Compute n / d in [1, 2) as uint32, times 2^25; the last bit is also set if nonzero bits follow it.

    Args:
        n: uint32 in [2^23, 2^25).
        d: Mantissa.
        estimate: n / d in float32, off by less than 8 units in the last place. XLA is off by 2 units on a GPU.
    """
    # Units are 2^-23. The quotient is at most 32 units too small, so that its remainder has at most 29 bits.
    quotient = (estimate * 2.0**23).astype(jnp.uint32) - 16
    rest = (n << 23) - quotient * d
    missing = lax.div(rest, d)
    quotient, rest = quotient + missing, (rest - missing * d) << 1
    half = (rest >= d).astype(jnp.uint32)
    return (quotient << 2) | (half << 1) | (rest != half * d).astype(jnp.uint32)


def _round_bits(q: Array, field: Array) -> Array:
    """Round q * 2^(field - 127 - 25) to float32 bits, ties to even, subnormal or infinite ones included.

    Args:
        q: uint32 in [2^25, 2^26); its last bit is also set if nonzero bits follow it.
        field: Exponent field of the result, which may be outside float32's range.
    """
    shift = jnp.minimum(jnp.maximum(3 - field, 2), 27).astype(jnp.uint32)
    below_half = ((jnp.uint32(1) << shift) >> 1) - 1
    rounded = (q + below_half + ((q >> shift) & 1)) >> shift
    # A mantissa that rounds up to the next power of two carries into the exponent, which is right as it stands.
    bits = (jnp.maximum(field - 1, 0).astype(jnp.uint32) << 23) + rounded
    return jnp.minimum(bits, INFINITY).astype(jnp.int32)
