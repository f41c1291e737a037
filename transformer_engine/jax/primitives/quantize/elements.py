"""Conversions to the element types FP8, E2M1 and E8M0, and multipliers for one scale per matrix."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from ....common.formats import E2M1, FLOAT32_MAX, Element
from .. import exact
from .spec import jax_dtype

_FP8_NAN = 0x7F  # NaN code in E4M3 and E5M2
_SIGN_AND_EXPONENT = -(1 << 23)  # 0xFF800000 as int32: all float32 bits except the mantissa

E8M0_NAN = 0xFF
E8M0_LARGEST = 0xFE
_HALF_LEAST_NORMAL = 0x00400000  # float32 bits for 2^-127, the least E8M0 scale


def absolute_maximum(x: Array) -> Array:
    """Compute max|x| as float32 [1]; 0 for an empty array, NaN if any element is NaN."""
    return exact.bits_to_float(jnp.max(exact.magnitude_bits(x), initial=0).reshape(1))


def row_maxima(x: Array, axis: int) -> Array:
    """Compute max|x| per row in x [*rows, *columns] as float32 [prod(rows)]; NaN where a row has a NaN."""
    bits = jnp.max(exact.magnitude_bits(x), axis=tuple(range(axis, x.ndim)), initial=0)
    return exact.bits_to_float(bits.reshape(-1))


def scale_from_amax(
    amax: Array,
    maximum: float,
    *,
    power_of_two: bool = False,
    epsilon: float = 0.0,
    value_for_inf: float = FLOAT32_MAX,
) -> Array:
    """Compute maximum / max(amax, epsilon) in float32; 1 where that amax is 0, infinite or NaN.

    Args:
        amax: Absolute maxima.
        maximum: Largest number of the element type.
        power_of_two: Round the quotient down to a power of two, by clearing its mantissa.
        epsilon: Least maximum.
        value_for_inf: Replaces an infinite quotient.
    """
    bits = exact.float_bits(amax.astype(jnp.float32))
    if epsilon > 0.0:
        bits = jnp.maximum(bits, exact.bits_of_constant(epsilon))
    scale = exact.float_bits(exact.divide(maximum, exact.bits_to_float(bits)))
    scale = jnp.where(scale == exact.INFINITY, exact.bits_of_constant(value_for_inf), scale)
    if power_of_two:
        scale = scale & _SIGN_AND_EXPONENT
    usable = (bits > 0) & (bits < exact.INFINITY)
    return exact.bits_to_float(jnp.where(usable, scale, exact.bits_of_constant(1.0)))


def value_for_inf(dtype: jnp.dtype) -> float:
    """Multiplier for values in dtype whose quotient overflows: the largest number in dtype or in float32."""
    return min(float(jnp.finfo(dtype).max), FLOAT32_MAX)


def nonzero_multiplier(multiplier: Array) -> Array:
    """Convert a caller's multipliers to float32, with 1 for 0: JAX's gradient for an unread state is 0."""
    multiplier = multiplier.astype(jnp.float32)
    # Compares bits: XLA on a CPU flushes subnormal values to 0 in a comparison.
    return jnp.where(exact.magnitude_bits(multiplier) == 0, 1.0, multiplier)


def cast(x: Array, element: Element) -> Array:
    """Round float32 x to the nearest codes, ties to even.

    Infinity becomes the maximum, and NaN of either sign becomes 0x7F.

    0x7F is NVIDIA's canonical NaN for both formats, which the kernels' conversion instruction produces.
    """
    dtype = jax_dtype(element)
    # The conversion alone turns values beyond the maximum into NaN (E4M3) or infinity (E5M2), and produces NaNs with
    # either sign.
    codes = jnp.clip(x, -element.maximum, element.maximum).astype(dtype)
    # As bytes: XLA selects between float8 values through another format, which changes NaNs.
    codes = jnp.where(jnp.isnan(x), jnp.uint8(_FP8_NAN), lax.bitcast_convert_type(codes, jnp.uint8))
    codes = lax.bitcast_convert_type(codes, dtype)
    # XLA for a GPU removes float32 -> float8 -> float32: without a barrier, readers in the same program would get
    # values that were never rounded.
    return lax.platform_dependent(codes, cpu=_identity, default=lax.optimization_barrier)


def _identity(codes: Array) -> Array:
    return codes  # one function: JAX caches traces by function identity


def encode(x: Array, element: Element, multiplier: Array) -> Array:
    """Compute cast(float32(x) * multiplier); x [R, K]."""
    multiplier = lax.expand_dims(multiplier, range(x.ndim - multiplier.ndim))
    return cast(x.astype(jnp.float32) * multiplier, element)


def encode_e2m1(x: Array, random: Array | None = None) -> Array:
    """Encode to E2M1: a sign and one of the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6 in four bits.

    Args:
        x: Values, float32. Those beyond 6 become 6, NaN becomes +6.
        random: Uniform numbers in [0, 1) in the shape of x, for stochastic rounding: floor(|x| + random * gap) on the
            grid, where gap is the distance between the two magnitudes that enclose |x|. None rounds to the nearest,
            ties to the even code.

    Returns:
        Codes, float4_e2m1fn.
    """
    x = jnp.where(jnp.isnan(x), E2M1.maximum, x)
    magnitude = jnp.abs(x)
    # The grid's gaps are 1/2 up to 2, 1 up to 4 and 2 up to 6: three stretches with 4, 2 and 1 codes. A code is
    # the sum over the three stretches: the part that |x| fills, in units of the gap. Every term is exact in float32.
    stretches = (
        jnp.minimum(magnitude, 2.0) * 2.0,
        jnp.clip(magnitude, 2.0, 4.0) - 2.0,
        (jnp.clip(magnitude, 4.0, 6.0) - 4.0) * 0.5,
    )
    if random is None:
        first, second, third = (jnp.round(stretch) for stretch in stretches)
        codes = first + second + third
    else:
        first, second, third = (jnp.floor(stretch) for stretch in stretches)
        floors = first + second + third
        # At most one stretch is partly filled.
        fraction = (stretches[0] - first) + (stretches[1] - second) + (stretches[2] - third)
        codes = floors + jnp.floor(fraction + random)
    sign = jnp.signbit(x).astype(jnp.uint8) << 3
    return lax.bitcast_convert_type(
        (codes.astype(jnp.uint8) | sign).astype(jnp.uint4), jnp.float4_e2m1fn
    )


def e8m0_from_float(v: Array) -> Array:
    """Find the least exponent byte e (int32) with 2^(e - 127) >= v, for float32 v >= 0.

    E8M0 stores a power of two 2^(e - 127) in one byte, the scale in OCP Microscaling Formats (MX) 1.0. NaN becomes 255,
    a value above 2^127 becomes 254.
    """
    bits = exact.float_bits(v)
    exponent = bits >> 23
    mantissa = bits & 0x007FFFFF
    above = jnp.where(exponent == 0, mantissa > _HALF_LEAST_NORMAL, mantissa != 0)
    rounded = jnp.minimum(exponent + above.astype(jnp.int32), E8M0_LARGEST)
    return jnp.where(bits > exact.INFINITY, E8M0_NAN, rounded)


def times_power(values: Array, exponent: Array) -> Array:
    """Compute values * 2^(exponent - 127) for E8M0 exponents, int32 in [0, 255]; 255 -> NaN.

    2^-127 is subnormal, and XLA on a CPU flushes it to zero: the result is values * 2^-126, halved, instead.
    """
    bits = jnp.where(exponent == E8M0_NAN, exact.NAN, jnp.maximum(exponent, 1) << 23)
    product = values * exact.bits_to_float(bits)
    return jnp.where(exponent == 0, product * 0.5, product)


def pack_e2m1(codes: Array) -> Array:
    """Pack float4_e2m1fn codes [.., C] in bytes, uint8 [.., C / 2], low half first."""
    bits = lax.bitcast_convert_type(codes, jnp.uint4).astype(jnp.uint8)
    pairs = bits.reshape(*codes.shape[:-1], codes.shape[-1] // 2, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpack_e2m1(packed: Array) -> Array:
    """Convert uint8 [.., C / 2], low half first, to float4_e2m1fn codes [.., C]."""
    halves = jnp.stack((packed & 15, packed >> 4), axis=-1)
    halves = halves.reshape(*packed.shape[:-1], 2 * packed.shape[-1])
    return lax.bitcast_convert_type(halves.astype(jnp.uint4), jnp.float4_e2m1fn)
