"""QuantizeSpec: a matrix quantization, independent of the array library."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from .formats import BLOCK_2D, BLOCK_FORMATS, TENSOR_FORMATS, TILED_FORMATS, Element, TensorFormat

# Errors by which 4over6 chooses between two block codings: absolute or squared differences, summed. The
# fast variants omit the second-level scale on both sides instead of multiplying every code by it.
MAE, MSE, FAST_MAE, FAST_MSE = "MAE", "MSE", "fast MAE", "fast MSE"
BLOCK_ERRORS = (MAE, MSE, FAST_MAE, FAST_MSE)
# Error measures with NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH=1.
FAST_ERRORS = {MAE: FAST_MAE, MSE: FAST_MSE}


@dataclass(frozen=True)
class QuantizeSpec:
    """Quantization of a matrix [M, K]; hashable, so that backends and caches can use it as a key.

    Attributes:
        format: Target format.
        element: Code element.
        rowwise: Quantize the matrix [M, K], for products that contract columns.
        columnwise: Also quantize the transposed matrix [K, M], for products that contract rows.
        power_of_two: FLOAT8 without a given scale, BLOCK: round the scale down to a power of two.
        epsilon: FLOAT8 without a given scale, BLOCK: the smallest absolute maximum from which a scale is computed.
        two_dimensional: NVFP4: 16 x 16 elements share a scale; MXFP8: 32 x 32.
        hadamard: NVFP4: transform the columnwise direction along the rows before quantizing.
        random_sign: Use the fixed sign vector in that transform instead of +1.
        stochastic: NVFP4: round stochastically; the caller passes the random numbers.
        four_over_six: NVFP4: map each block's maximum to 4 or to 6, whichever has the smaller error by this measure
            (`BLOCK_ERRORS`); empty: always to 6.
        tiled: MXFP8, NVFP4: scales in swizzled order, padded with zeros to 128 x 4 tiles.
    """

    format: TensorFormat
    element: Element
    rowwise: bool = True
    columnwise: bool = False
    power_of_two: bool = False
    epsilon: float = 0.0
    two_dimensional: bool = False
    hadamard: bool = False
    random_sign: bool = True
    stochastic: bool = False
    four_over_six: str = ""
    tiled: bool = False

    @property
    def operand_format(self) -> TensorFormat:
        """Operand format, which records powers of two and the scales' swizzled order."""
        form = self.format
        if self.tiled:
            return TILED_FORMATS[form]
        if not self.power_of_two or form not in BLOCK_FORMATS.values():
            return form
        return BLOCK_FORMATS[form == BLOCK_2D, True]

    @property
    def columnwise_operand_format(self) -> TensorFormat:
        """Columnwise operand format, with its scales tiled if `tiled`."""
        return (
            TILED_FORMATS[self.format.columnwise] if self.tiled else self.operand_format.columnwise
        )

    def __post_init__(self) -> None:
        if not (self.rowwise or self.columnwise):
            raise ValueError(
                "rowwise=False and columnwise=False ask for nothing; set at least one of them"
            )
        form = self.format
        if self.element.name not in form.elements:
            raise ValueError(
                f"format {form.name} cannot hold element {self.element.name}; supported: {' or '.join(form.elements)}"
            )
        if self.tiled and form not in TILED_FORMATS:
            raise ValueError(
                f"tiled=True is for scales of one byte, which {form.name} has not; leave it out"
            )
        if self.two_dimensional and not form.two_dimensional:
            raise ValueError(
                f"two_dimensional is a choice of {_formats_by_option('two_dimensional')}, not of {form.name}; "
                "block scaling has the format BLOCK_2D"
            )
        if (self.hadamard and not form.hadamard) or (self.stochastic and not form.stochastic):
            raise ValueError(
                f"hadamard and stochastic belong to {_formats_by_option('hadamard')}, not to {form.name}; drop them"
            )
        if self.two_dimensional and self.hadamard:
            raise ValueError(
                "two_dimensional needs both directions to hold the same values, hadamard transforms one "
                "of them; choose one"
            )
        if self.four_over_six:
            if self.four_over_six not in BLOCK_ERRORS:
                raise ValueError(
                    f"four_over_six={self.four_over_six!r} is not a known error measure; choose one of "
                    f"{', '.join(BLOCK_ERRORS)}"
                )
            if not self.format.four_over_six:
                raise ValueError(
                    f"four_over_six belongs to {_formats_by_option('four_over_six')}, not to {self.format.name}; "
                    "leave it empty"
                )
            if self.hadamard or self.stochastic:
                raise ValueError(
                    f"four_over_six={self.four_over_six!r} compares nearest roundings of the values themselves; "
                    "set hadamard=False and stochastic=False"
                )

    def __hash__(self) -> int:
        """Hash names instead of entire formats, once: a spec is part of every quantization's key."""
        cached = self.__dict__.get("_hash")
        return self._store_hash() if cached is None else cached

    def _store_hash(self) -> int:
        directions = (
            self.rowwise,
            self.columnwise,
            self.two_dimensional,
            self.hadamard,
            self.stochastic,
        )
        options = (self.power_of_two, self.epsilon, self.four_over_six)
        digest = hash((self.format.name, self.element.name, options, directions))
        object.__setattr__(self, "_hash", digest)
        return digest

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the fields alone: the hash of a string differs between processes."""
        return type(self), tuple(getattr(self, field.name) for field in fields(self))

    @property
    def tile(self) -> tuple[int, int] | None:
        """Shape (rows, K) of the elements that share a scale; None: the whole matrix."""
        block = self.format.block
        if block is not None and self.two_dimensional:
            return (block[1], block[1])
        return block

    @property
    def transposes(self) -> bool:
        """Whether the columnwise result is the rowwise result, exactly transposed."""
        tile = self.tile
        return tile is None or tile[0] == tile[1]


def _formats_by_option(option: str) -> str:
    return " and ".join(form.name for form in TENSOR_FORMATS if getattr(form, option))
