"""Block-scaled FP8 optimizer states: codes uint8, and one exponent, uint8, per 128 consecutive values.

The exponent is the float32 exponent field of the block's largest magnitude, at least 16, and one more if this magnitude
can round up to the next power of two. It scales the block by a power of two, so that rounded magnitudes are below 2^8
in first moments (E4M3) and below 2^15 in second moments, whose codes have no sign (5 exponent bits, 3 mantissa bits).
No value saturates, and decoded values are encoded without an error. A block with an infinity or a NaN has the exponent
255 and decodes to NaN. A positive second moment never becomes 0, because Adam divides by its root.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ....common.formats import ceil_div
from ....common.operation_settings import STATE_BLOCK

_DROPPED = 20  # mantissa bits that the codes lack
LEAST_EXPONENT = 16
_NONFINITE = 255
_INFINITY_BITS = 0x7F800000
_WORD = 0xFFFFFFFF


class BlockFormat(NamedTuple):
    """An 8-bit floating-point format with three mantissa bits.

    Attributes:
        signed: The highest bit is the sign; otherwise it belongs to the exponent.
        top: Exponent of a block's largest scaled magnitude.
        rebias: float32's exponent bias minus the format's.
        multiplier: Factor that derives the format's random bits from a random word.
    """

    signed: bool
    top: int
    rebias: int
    multiplier: int


FIRST = BlockFormat(signed=True, top=7, rebias=120, multiplier=0x9E3779B1)
SECOND = BlockFormat(signed=False, top=14, rebias=112, multiplier=0x85EBCA6B)


def block_count(elements: int) -> int:
    """Number of blocks; the last one may be incomplete."""
    return ceil_div(elements, STATE_BLOCK)


def decode(codes: Tensor, exponents: Tensor, block_format: BlockFormat) -> Tensor:
    """Decode states to float32, shaped like the codes."""
    code = codes.reshape(-1).to(torch.int32)
    magnitude = code & 0x7F if block_format.signed else code
    values = (magnitude << _DROPPED).view(torch.float32) * 2.0**block_format.rebias
    if block_format.signed:
        values = torch.where(code >= 0x80, -values, values)
    scale = _power_of_two(exponents.to(torch.int32) - block_format.top)
    scale = torch.where(exponents == _NONFINITE, torch.nan, scale)
    return (values * _spread(scale, code.numel())).view(codes.shape)


def encode(
    values: Tensor, block_format: BlockFormat, words: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Round float32 values to codes with their shape and exponents [blocks].

    Args:
        values: Values; signs count in first moments only.
        block_format: `FIRST` or `SECOND`.
        words: Random words as int64, one per value, for stochastic rounding; None: to nearest, ties to even.
    """
    flat = values.reshape(-1).to(torch.float32)
    blocks = block_count(flat.numel())
    magnitude = flat.abs()
    bits = torch.nn.functional.pad(magnitude, (0, blocks * STATE_BLOCK - flat.numel()))
    largest = bits.view(torch.int32).view(blocks, STATE_BLOCK).amax(1)
    # The carry reaches the exponent field if the largest magnitude can round up to a power of two.
    carry = 1 << _DROPPED - 1 if words is None else (1 << _DROPPED) - 1
    exponents = (largest + carry >> 23).clamp_(LEAST_EXPONENT, _NONFINITE - 1)
    exponents = torch.where(largest >= _INFINITY_BITS, _NONFINITE, exponents)
    inverse = _spread(_power_of_two(254 + block_format.top - exponents), flat.numel())
    shifted = ((magnitude * inverse) * 2.0**-block_format.rebias).view(torch.int32)
    if words is None:
        added = (1 << _DROPPED - 1) - 1 + ((shifted >> _DROPPED) & 1)
    else:
        added = (((words * block_format.multiplier) & _WORD) >> 32 - _DROPPED).to(torch.int32)
    code = (shifted + added) >> _DROPPED
    if block_format.signed:
        code = torch.where(flat < 0, code | 0x80, code)
    else:
        code = torch.maximum(code, (magnitude > 0).to(torch.int32))
    code = torch.where(_spread(exponents, flat.numel()) == _NONFINITE, 0, code)
    return code.to(torch.uint8).view(values.shape), exponents.to(torch.uint8)


def random_words(
    first: int | Tensor, count: int, seed: int | Tensor, device: torch.device
) -> Tensor:
    """Random words in [0, 2^32) as int64 [count], determined by the seed and the numbers first, first + 1, ..

    The function is the "lowbias32" integer hash.
    """
    numbers = torch.arange(count, device=device) + first
    x = (numbers ^ (torch.as_tensor(seed, device=device).to(torch.int64) * 0x9E3779B9)) & _WORD
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _WORD
    return x ^ (x >> 16)


def round_stochastically(values: Tensor, words: Tensor) -> Tensor:
    """Round float32 to bfloat16 up or down with probabilities that make the mean exact."""
    bits = values.contiguous().view(torch.int32)
    finite = (bits & 0x7F800000) != 0x7F800000
    upper = (bits + (words.view(values.shape) & 0xFFFF).to(torch.int32)) >> 16
    rounded = upper.to(torch.int16).view(torch.bfloat16)
    return torch.where(finite, rounded, values.to(torch.bfloat16))


def _power_of_two(field: Tensor) -> Tensor:
    """float32 number with this exponent field, int32."""
    return (field << 23).view(torch.float32)


def _spread(of_blocks: Tensor, elements: int) -> Tensor:
    """One number per element from one per block."""
    return of_blocks.repeat_interleave(STATE_BLOCK)[:elements]
