"""Quantization formats as data: the element, the elements that share a scale, and the storage of the scale."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from .hardware import Capability


@dataclass(frozen=True)
class Element:
    """A narrow floating-point number: value = (-1)^s * 2^(e - bias) * (1 + m / 2^mantissa_bits).

    Attributes:
        name: Element name.
        bits: Number of bits.
        mantissa_bits: Number of mantissa bits.
        bias: Exponent bias.
        greatest: The largest finite number, as text. While shapes are dynamic, a compiler turns a float attribute into
            a symbol, which it cannot use in two layers of one graph.
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
# NVFP4 block scales that leave room for 1.5 times themselves: 1.5 x 256 = 384 is below E4M3's maximum.
E4M3_UP_TO_256 = replace(E4M3, greatest="0x1p+8")


@dataclass(frozen=True)
class TensorFormat:
    """Quantization of a matrix [rows, K], where K is the axis that a product contracts.

    Formats with the same name, block, scale and packing are equal.

    Attributes:
        name: Format name.
        block: (rows, K) shape of the elements that share one scale; None: the whole tensor shares one scale.
        scale: "float32", "e8m0" (a power of two in one byte) or "e4m3".
        packing: Number of codes per byte.
        elements: Names of the supported code elements.
        levels: Two scale levels: the elements of the codes and of the block scales, which share the range.
        two_dimensional: Square tiles, block[1] x block[1], can share a scale, which is repeated for their rows.
        hadamard: The columnwise direction supports a Hadamard transform.
        stochastic: Stochastic rounding is supported.
        fits_bfloat16: Every code times its block scale is exact in bfloat16, apart from the tensor's scale.
        four_over_six: A block's maximum can map to 4 instead of 6, if that has the smaller error.
        row_scaled: The second scale level has one scale per row instead of one per tensor.
        columns: Format for the columnwise direction, if it differs from this one.
        block_products: Capability of GPUs that multiply two matrices with these block scales; formats with an equal
            one multiply each other. None: one scale per tensor, or no kernel.
        general: The format that this one is a variant of, for operands: its float32 scales are powers of two, or its
            one-byte scales are in swizzled order. None: no variant.
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
    four_over_six: bool = field(default=False, compare=False)
    row_scaled: bool = field(default=False, compare=False)
    columns: TensorFormat | None = field(default=None, compare=False)
    block_products: Capability | None = field(default=None, compare=False)
    general: TensorFormat | None = field(default=None, compare=False)

    @property
    def columnwise(self) -> TensorFormat:
        """Columnwise format for a matrix whose rowwise direction has this format."""
        return self if self.columns is None else self.columns

    @property
    def swizzled(self) -> bool:
        """Whether matrix instructions read the scales, one byte each and in swizzled order."""
        return self.scale in ("e8m0", "e4m3")

    @property
    def power_of_two(self) -> bool:
        """Whether an operand's float32 scales are powers of two."""
        return self.general is not None and not self.swizzled

    @property
    def has_exponent_scales(self) -> bool:
        """Whether each block has one scale, an exponent in one byte."""
        return self.scale == "e8m0"

    @property
    def length(self) -> int:
        """Elements along K that share a scale."""
        assert self.block is not None
        return self.block[1]

    @property
    def in_tiles(self) -> bool:
        """Whether an operand's scales are in swizzled order, padded to 128 x 4 tiles."""
        return self.general is not None and self.swizzled

    @property
    def unit_amax(self) -> float | None:
        """The amax at which the second scale level is one; None: the format has one level."""
        return None if self.levels is None else self.levels[0].maximum * self.levels[1].maximum


FLOAT8 = TensorFormat("float8", None, "float32", fits_bfloat16=True)
BLOCK_1D = TensorFormat("block1d", (1, 128), "float32", block_products="fp8 products")
BLOCK_2D = TensorFormat("block2d", (128, 128), "float32", block_products="fp8 products")
# Operands whose scales are powers of two: matrix instructions that read exponents can multiply them.
BLOCK_1D_POWERS = replace(BLOCK_1D, name="block1d_powers", general=BLOCK_1D)
BLOCK_2D_POWERS = replace(BLOCK_2D, name="block2d_powers", general=BLOCK_2D)
BLOCK_FORMATS = {  # by whether blocks are square, and whether scales are powers of two
    (False, False): BLOCK_1D,
    (False, True): BLOCK_1D_POWERS,
    (True, False): BLOCK_2D,
    (True, True): BLOCK_2D_POWERS,
}
MXFP8 = TensorFormat(
    "mxfp8",
    (1, 32),
    "e8m0",
    two_dimensional=True,
    fits_bfloat16=True,
    block_products="mxfp8 products",
)
# Format whose exponents the BLOCK_FORMATS exponents become, and the capability that multiplies them.
EXPONENTS = MXFP8
EXPONENT_PRODUCTS: Capability = "mxfp8 products"
# Two levels: an E4M3 scale for 16 elements, and one float32 scale for the tensor, derived from its amax. The variants
# differ in the largest block scale and in what shares the second level: `NVFP4_FORMATS[row_scaled, largest scale]`.
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
    four_over_six=True,
    block_products="nvfp4 products",
)
NVFP4_256 = replace(NVFP4, name="nvfp4_256", levels=(E2M1, E4M3_UP_TO_256))
# Formats with one scale per row support neither the transform, nor square tiles, nor stochastic rounding.
_PER_ROW = {"row_scaled": True, "two_dimensional": False, "hadamard": False, "stochastic": False}
NVFP4_ROWS = replace(NVFP4, name="nvfp4_rows", columns=NVFP4, **_PER_ROW)
NVFP4_ROWS_256 = replace(NVFP4_256, name="nvfp4_rows_256", columns=NVFP4_256, **_PER_ROW)
NVFP4_FORMATS = {
    (form.row_scaled, int(form.levels[1].maximum)): form
    for form in (NVFP4, NVFP4_256, NVFP4_ROWS, NVFP4_ROWS_256)
    if form.levels is not None
}

# Operands whose scales are in swizzled order.
TILED_FORMATS = {
    form: replace(form, name=f"{form.name}_tiled", general=form)
    for form in (MXFP8, *NVFP4_FORMATS.values())
}

# One format per family; NVFP4 variants are reached through `NVFP4_FORMATS`.
TENSOR_FORMATS = (FLOAT8, BLOCK_1D, BLOCK_2D, MXFP8, NVFP4)
# in messages
SWIZZLED_NAMES = " or ".join(form.name.upper() for form in TENSOR_FORMATS if form.swizzled)

# Quantized checkpoints from `pytorch.conversion` that need no sample tokens, for commands without torch.
SERVING_FORMATS = ("fp8", "fp8_channel", "fp8_block", "mxfp8", "nvfp4")

FLOAT32_MAX = 3.4028234663852886e38


def float32_max() -> float:
    """FLOAT32_MAX for traced code: compilers turn a global float into a symbol too; see `Element.greatest`."""
    return 3.4028234663852886e38


def ceil_div(n: int, d: int) -> int:
    """Compute n / d, rounded up."""
    return -(-n // d)


def round_up(n: int, multiple: int) -> int:
    """Compute the smallest number >= n that is divisible by multiple."""
    return ceil_div(n, multiple) * multiple
