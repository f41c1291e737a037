"""Float32 steps that every quantization kernel shares, each bit-equal to its counterpart in plain torch.

Saturation is left to the conversion: from compute capability 9.0 on, Triton converts float32 to FP8 with
`cvt.rn.satfinite`, which also saturates infinities and converts every NaN to the canonical code 0x7F.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def magnitude_bits(x):
    """Return int32 bits of |float32(x)|, which are ordered like the magnitudes, with NaN above infinity.

    A maximum over them propagates NaN, which Triton's floating-point reductions drop.
    """
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def as_float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def given_multiplier(multiplier, ZERO_IS_ONE: tl.constexpr):
    """Return the multiplier [1] that the caller passes.

    With ZERO_IS_ONE, 0 is read as 1. In JAX, 0 is the gradient of a state that the previous step did not read.
    """
    factor = tl.load(multiplier)
    if ZERO_IS_ONE:
        factor = tl.where(factor == 0.0, 1.0, factor)
    return factor


@triton.jit
def scale_from_amax(
    amax,
    MAXIMUM: tl.constexpr,
    EPSILON: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    VALUE_FOR_INF: tl.constexpr,
):
    """Return scale = MAXIMUM / max(amax, EPSILON) in float32 and 1 / scale.

    The scale is 1 if the amax is 0, infinite or NaN, and VALUE_FOR_INF if the quotient overflows.
    """
    if EPSILON > 0.0:
        amax = tl.where(amax < EPSILON, EPSILON, amax)  # NaN stays NaN
    if POWER_OF_TWO:
        return _power_of_two_scale(amax, MAXIMUM, VALUE_FOR_INF)
    scale = tl.div_rn(MAXIMUM, amax)
    scale = tl.where(scale == float("inf"), VALUE_FOR_INF, scale)
    scale = tl.where((amax > 0.0) & (amax < float("inf")), scale, 1.0)
    return scale, tl.div_rn(1.0, scale)


@triton.jit
def _power_of_two_scale(amax, MAXIMUM: tl.constexpr, VALUE_FOR_INF: tl.constexpr):
    """Return the quotient rounded down to a power of two, from exponents only: a division costs 10 instructions.

    Both FP8 maxima are 1.75 * 2^n, so that the quotient by f * 2^e is at least 2^(n - e) exactly if f <= 1.75, and
    rounding never reaches the next power of two.
    """
    tl.static_assert(MAXIMUM == 448.0 or MAXIMUM == 57344.0)
    tl.static_assert(VALUE_FOR_INF >= 65504.0)
    # In units of an exponent field: n plus the biases of dividend and quotient.
    top: tl.constexpr = 0x83000000 if MAXIMUM == 448.0 else 0x86800000
    bits = amax.to(tl.uint32, bitcast=True)
    # 0x1FFFFF carries into the exponent when the mantissa exceeds 0x600000, that of 1.75.
    scale = tl.minimum(top - ((bits + 0x1FFFFF) & 0xFF800000), 0x7F000000)
    usable = bits - 1 < 0x7F7FFFFF  # unsigned: not 0, infinite, NaN or negative
    scale = tl.where(usable, scale, 0x3F800000).to(tl.uint32)
    # The inverse of 2^127 is subnormal, which an exponent field cannot express: twice the inverse, halved.
    inverse = (0x7F800000 - scale).to(tl.float32, bitcast=True) * 0.5
    return scale.to(tl.float32, bitcast=True), inverse
