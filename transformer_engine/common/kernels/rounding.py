"""Float32 steps that every quantization kernel shares, each bit-equal to its counterpart in plain torch.

Every conversion to FP8 codes saturates values and infinities and converts every NaN to the canonical code 0x7F, as
`cvt.rn.satfinite` does. `conversion` lists the three ways.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import conversion

_NATIVE, _INSTRUCTION = tl.constexpr(conversion.NATIVE), tl.constexpr(conversion.INSTRUCTION)
_E4M3 = tl.constexpr(conversion.INTEGERS["float8_e4m3fn"])
_E5M2 = tl.constexpr(conversion.INTEGERS["float8_e5m2"])
# Two pairs of codes per 32-bit register. The instruction's first operand becomes the upper half.
_PTX = (
    "{{ .reg .b16 a, b; cvt.rn.satfinite.{0}x2.f32 a, $2, $1; cvt.rn.satfinite.{0}x2.f32 b, $4, $3; "
    "mov.b32 $0, {{a, b}}; }}"
)
_PTX_E4M3, _PTX_E5M2 = tl.constexpr(_PTX.format("e4m3")), tl.constexpr(_PTX.format("e5m2"))


@triton.jit
def to_codes(values, element: tl.constexpr, CONVERSION: tl.constexpr):
    """Round float32 values to FP8 codes: to nearest, ties to even, saturating; NaN becomes 0x7F.

    Args:
        values: Values, float32.
        element: Element type that the code pointer has; uint8 with integer arithmetic.
        CONVERSION: See `conversion`.
    """
    if CONVERSION == _NATIVE:
        return values.to(element)
    elif CONVERSION == _INSTRUCTION:
        return _to_codes_by_instruction(values, element)
    elif CONVERSION == _E4M3:
        # 3 mantissa bits, bias 7; the unit of subnormals below 2^-6 is 2^-9 = 2^14 / 2^23.
        return _to_codes_by_integers(values, 20, 120, 0x3C800000, 16384.0, 0x46800000, 0x7E)
    else:
        # 2 mantissa bits, bias 15; the unit of subnormals below 2^-14 is 2^-16 = 2^7 / 2^23.
        tl.static_assert(CONVERSION == _E5M2)
        return _to_codes_by_integers(values, 21, 112, 0x38800000, 128.0, 0x43000000, 0x7B)


@triton.jit
def to_scale_codes(values, element: tl.constexpr, CONVERSION: tl.constexpr):
    """Round float32 block scales to E4M3 codes like `to_codes`, by integers in place of inline PTX.

    The inline PTX packs four values per thread. A tile with square blocks has fewer scales than that, and codes
    differed on an H200.
    """
    if CONVERSION == _INSTRUCTION:
        codes = _to_codes_by_integers(values, 20, 120, 0x3C800000, 16384.0, 0x46800000, 0x7E)
        return codes.to(element, bitcast=True)
    else:
        return to_codes(values, element, CONVERSION)


@triton.jit
def to_compared_scale_codes(values, element: tl.constexpr, CONVERSION: tl.constexpr):
    """Round float32 block scales from 0 to 448, or NaN, to E4M3 codes like `to_scale_codes`, by integers only.

    The native conversion rounds two values at once. In kernels that select between two scales per block, ptxas 12.8
    reads the second of the two codes before the instruction has written it (sm_90's machine code).
    """
    bits = values.to(tl.int32, bitcast=True)
    normal = ((bits + (0x7FFFF + ((bits >> 20) & 1))) >> 20) - (120 << 3)
    subnormal = (values + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    codes = tl.where(values == values, tl.where(bits < 0x3C800000, subnormal, normal), 0x7F)
    codes = codes.to(tl.uint8)
    return codes if CONVERSION == _E4M3 else codes.to(element, bitcast=True)


@triton.jit
def _to_codes_by_instruction(values, element: tl.constexpr):
    tl.static_assert(element == tl.float8e4nv or element == tl.float8e5)
    ptx: tl.constexpr = _PTX_E4M3 if element == tl.float8e4nv else _PTX_E5M2
    codes = tl.inline_asm_elementwise(
        ptx, "=r,f,f,f,f", [values], dtype=tl.int8, is_pure=True, pack=4
    )
    return codes.to(element, bitcast=True)


@triton.jit
def _to_codes_by_integers(
    values,
    DROPPED: tl.constexpr,
    REBIAS: tl.constexpr,
    NORMAL: tl.constexpr,
    ROUNDER: tl.constexpr,
    ROUNDER_BITS: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Round float32 values to codes as bytes.

    Args:
        values: Values, float32.
        DROPPED: float32 mantissa bits that the codes do not have.
        REBIAS: Exponent bias difference.
        NORMAL: Bits of the smallest normal number.
        ROUNDER: Power of two whose last mantissa bit is the smallest subnormal number, so that a sum rounds to it.
        ROUNDER_BITS: Bits of ROUNDER.
        LARGEST: Largest finite code.
    """
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    odd = (magnitude >> DROPPED) & 1
    half: tl.constexpr = (1 << (DROPPED - 1)) - 1
    normal = ((magnitude + (half + odd)) >> DROPPED) - (REBIAS << (23 - DROPPED))
    subnormal = (as_float(magnitude) + ROUNDER).to(tl.int32, bitcast=True) - ROUNDER_BITS
    code = tl.minimum(tl.where(magnitude < NORMAL, subnormal, normal), LARGEST) | (
        (bits >> 24) & 0x80
    )
    return tl.where(magnitude > 0x7F800000, 0x7F, code).to(tl.uint8)


@triton.jit
def to_values(codes, CONVERSION: tl.constexpr):
    """Decode FP8 codes to float32, exactly."""
    if CONVERSION == _E4M3:
        byte = codes.to(tl.int32)
        # A code's exponent field, moved to float32's field, is 120 too small, also where it is subnormal.
        magnitude = as_float((byte & 0x7F) << 20) * 1.329227995784916e36  # 2^120
        magnitude = tl.where((byte & 0x7F) == 0x7F, float("nan"), magnitude)
        return as_float(magnitude.to(tl.int32, bitcast=True) | ((byte & 0x80) << 24))
    elif CONVERSION == _E5M2:
        # The upper byte of a float16.
        return (codes.to(tl.int16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return codes.to(tl.float32)


@triton.jit
def magnitude_bits(x):
    """Compute the int32 bits of |float32(x)|, which are ordered like the magnitudes, with NaN above infinity.

    A maximum over them propagates NaN, which Triton's floating-point reductions drop.
    """
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def as_float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def take_multiplier(multiplier, ZERO_IS_ONE: tl.constexpr):
    """Load the multiplier [1] that the caller passes.

    With ZERO_IS_ONE, 0 is read as 1. In JAX, a state that the previous step did not read has the gradient 0.
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
    """Compute scale = MAXIMUM / max(amax, EPSILON) in float32 and 1 / scale.

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
    """Compute the quotient rounded down to a power of two, from exponents only: a division costs 10 instructions.

    Both FP8 maxima are 1.75 * 2^n, so that the quotient by f * 2^e is at least 2^(n - e) exactly if f <= 1.75, and
    rounding never reaches the next power of two.
    """
    tl.static_assert(MAXIMUM == 448.0 or MAXIMUM == 57344.0)
    tl.static_assert(VALUE_FOR_INF >= 65504.0)
    # In exponent-field units: n plus the biases of dividend and quotient.
    top: tl.constexpr = 0x83000000 if MAXIMUM == 448.0 else 0x86800000
    bits = amax.to(tl.uint32, bitcast=True)
    # 0x1FFFFF carries into the exponent when the mantissa exceeds 0x600000, the mantissa of 1.75.
    scale = tl.minimum(top - ((bits + 0x1FFFFF) & 0xFF800000), 0x7F000000)
    usable = bits - 1 < 0x7F7FFFFF  # unsigned: not 0, infinite, NaN or negative
    scale = tl.where(usable, scale, 0x3F800000).to(tl.uint32)
    # The inverse of 2^127 is subnormal, which an exponent field cannot express: twice the inverse, halved.
    inverse = (0x7F800000 - scale).to(tl.float32, bitcast=True) * 0.5
    return scale.to(tl.float32, bitcast=True), inverse
