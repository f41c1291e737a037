"""Block-scaled FP8 optimizer states and stochastic rounding in kernels: tiles [blocks, 128] of consecutive values.

`pytorch/primitives/multi_tensor/block_states.py` describes the formats and has equal bits. Integer arithmetic decodes
and encodes on every GPU: the product with 2^-rebias aligns the exponents, also for subnormal numbers, so that the upper
bits of a float32 number are a code.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .rounding import as_float, magnitude_bits

_NONFINITE = tl.constexpr(255)
_INFINITY_BITS = tl.constexpr(0x7F800000)
_LEAST_EXPONENT = tl.constexpr(16)


@triton.jit
def _top(SIGNED: tl.constexpr):
    """Exponent of a block's largest scaled magnitude: E4M3 for first moments, unsigned E5M3 for second moments."""
    return 7 if SIGNED else 14


@triton.jit
def decode(codes, exponents, SIGNED: tl.constexpr):
    """Decode uint8 codes [blocks, 128] with exponents [blocks] to float32."""
    code = codes.to(tl.int32)
    exponent = exponents.to(tl.int32)
    if SIGNED:
        values = as_float((code & 0x7F) << 20) * 1.329227995784916e36  # 2^120
        values = tl.where(code >= 0x80, -values, values)
    else:
        values = as_float(code << 20) * 5.192296858534828e33  # 2^112
    scale = as_float((exponent - _top(SIGNED)) << 23)
    scale = tl.where(exponent == _NONFINITE, float("nan"), scale)
    return values * scale[:, None]


@triton.jit
def encode(values, words, SIGNED: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Round float32 values [blocks, 128] to codes uint8 and exponents uint8 [blocks].

    Args:
        values: Values; those of second moments are not negative.
        words: Random words uint32, read with STOCHASTIC.
        SIGNED: First moments.
        STOCHASTIC: Round stochastically instead of to nearest, ties to even.
    """
    magnitude = tl.abs(values)
    largest = tl.max(magnitude_bits(values), 1)
    # The carry reaches the exponent field if the largest magnitude can round up to a power of two.
    carry = 0xFFFFF if STOCHASTIC else 0x80000
    exponent = tl.minimum(tl.maximum((largest + carry) >> 23, _LEAST_EXPONENT), _NONFINITE - 1)
    exponent = tl.where(largest >= _INFINITY_BITS, _NONFINITE, exponent)
    scaled = magnitude * as_float((254 + _top(SIGNED) - exponent) << 23)[:, None]
    if SIGNED:
        shifted = (scaled * 7.52316384526264e-37).to(tl.int32, bitcast=True)  # 2^-120
    else:
        shifted = (scaled * 1.925929944387236e-34).to(tl.int32, bitcast=True)  # 2^-112
    if STOCHASTIC:
        added = (words * (0x9E3779B1 if SIGNED else 0x85EBCA6B)) >> 12
        code = (shifted + added.to(tl.int32)) >> 20
    else:
        code = (shifted + 0x7FFFF + ((shifted >> 20) & 1)) >> 20
    if SIGNED:
        code = tl.where(values < 0.0, code | 0x80, code)
    else:
        code = tl.where((code == 0) & (magnitude > 0.0), 1, code)
    code = tl.where((exponent == _NONFINITE)[:, None], 0, code)
    return code.to(tl.uint8), exponent.to(tl.uint8)


@triton.jit
def random_words(numbers, seed):
    """Hash int32 numbers and a seed to random uint32 words (the "lowbias32" hash)."""
    x = numbers.to(tl.uint32, bitcast=True) ^ (seed.to(tl.uint32) * 0x9E3779B9)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def round_stochastically(values, words):
    """Round float32 to bfloat16 up or down with probabilities that make the mean exact."""
    bits = values.to(tl.int32, bitcast=True)
    upper = (bits + (words & 0xFFFF).to(tl.int32)) >> 16
    rounded = upper.to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.where((bits & 0x7F800000) == 0x7F800000, values.to(tl.bfloat16), rounded)
