"""Quantization formats as data: which element, which elements share a scale, how the scale is stored."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Element:
    """A narrow floating-point number: value = (-1)^s * 2^(e - bias) * (1 + m / 2^mantissa_bits).

    greatest   the largest finite number, as text: a compiler makes a symbol of a float that it finds in an object
               while shapes are dynamic, and cannot use it in two layers of one graph
    """

    name: str
    bits: int
    mantissa_bits: int
    bias: int
    greatest: str

    @property
    def maximum(self) -> float:
        return float.fromhex(self.greatest)


# OCP 8-bit Floating Point Specification 1.0 (E4M3 has no infinity) and OCP Microscaling Formats 1.0 (E2M1).
E4M3 = Element("e4m3", bits=8, mantissa_bits=3, bias=7, greatest="0x1.cp+8")  # 448
E5M2 = Element("e5m2", bits=8, mantissa_bits=2, bias=15, greatest="0x1.cp+15")  # 57344
E2M1 = Element("e2m1", bits=4, mantissa_bits=1, bias=1, greatest="0x1.8p+2")  # 6


@dataclass(frozen=True)
class TensorFormat:
    """How a matrix [rows, K] is quantized, K being the axis that a product contracts.

    block   (rows, K) extent of the elements that share one scale; None: the whole tensor shares it
    scale   "float32", "e8m0" (a power of two in one byte) or "e4m3"
    packing codes in one byte

    What follows does not tell formats apart: two with the same four fields above are the same format.

    elements          names of the elements that the codes may be
    levels            two levels of scales: the elements of the codes and of the blocks' scales, which share the range
    two_dimensional   may square tiles of block[1] x block[1] share a scale, which is repeated on their rows?
    hadamard          may the column direction be Hadamard transformed?
    stochastic        is stochastic rounding defined?
    fits_bfloat16     is every code times its block's scale exact in bfloat16 (the tensor's scale apart)?
    """

    name: str
    block: tuple[int, int] | None
    scale: str
    packing: int = 1
    elements: tuple[str, ...] = field(default=(E4M3.name, E5M2.name), compare=False)
    levels: tuple[Element, Element] | None = field(default=None, compare=False)
    two_dimensional: bool = field(default=False, compare=False)
    hadamard: bool = field(default=False, compare=False)
    stochastic: bool = field(default=False, compare=False)
    fits_bfloat16: bool = field(default=False, compare=False)

    @property
    def unit_amax(self) -> float | None:
        """The amax of a tensor at which the second of two levels of scales is one; None: there is one level."""
        return None if self.levels is None else self.levels[0].maximum * self.levels[1].maximum


FLOAT8 = TensorFormat("float8", None, "float32", fits_bfloat16=True)
BLOCK_1D = TensorFormat("block1d", (1, 128), "float32")
BLOCK_2D = TensorFormat("block2d", (128, 128), "float32")
MXFP8 = TensorFormat("mxfp8", (1, 32), "e8m0", two_dimensional=True, fits_bfloat16=True)
# Two levels: an E4M3 scale for 16 elements, and one float32 scale for the tensor, derived from its amax.
NVFP4 = TensorFormat(
    "nvfp4",
    (1, 16),
    "e4m3",
    packing=2,
    elements=(E2M1.name,),
    levels=(E2M1, E4M3),
    two_dimensional=True,
    hadamard=True,
    stochastic=True,
    fits_bfloat16=True,
)

TENSOR_FORMATS = (FLOAT8, BLOCK_1D, BLOCK_2D, MXFP8, NVFP4)

FLOAT32_MAX = 3.4028234663852886e38


def float32_max() -> float:
    """FLOAT32_MAX where a compiler traces: it makes a symbol of a global float too, see Element.greatest."""
    return 3.4028234663852886e38


def ceil_div(n: int, d: int) -> int:
    """n / d, rounded up."""
    return -(-n // d)


def round_up(n: int, multiple: int) -> int:
    """The least number from n on that is divisible by multiple."""
    return ceil_div(n, multiple) * multiple
