"""What a quantization is asked for, whatever library holds the matrix."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from .formats import TENSOR_FORMATS, Element, TensorFormat


@dataclass(frozen=True)
class QuantizeSpec:
    """One way to quantize a matrix [M, K]; hashable, so that backends and caches can key on it.

    columnwise        also the codes of the transposed matrix [K, M], for products that contract rows
    power_of_two      FLOAT8 without a given scale, BLOCK: round the scale down to a power of two
    epsilon           FLOAT8 without a given scale, BLOCK: the least absolute maximum a scale is made from
    two_dimensional   NVFP4: 16 x 16 elements share a scale; MXFP8: 32 x 32
    hadamard          NVFP4: transform the columnwise direction along the rows before quantizing
    random_sign       the fixed sign vector of that transform, else all +1
    stochastic        NVFP4: round stochastically; the caller gives the random numbers
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

    def __post_init__(self) -> None:
        if not (self.rowwise or self.columnwise):
            raise ValueError("rowwise=False and columnwise=False ask for nothing; set at least one of them")
        form = self.format
        if self.element.name not in form.elements:
            raise ValueError(
                f"format {form.name} cannot hold element {self.element.name}; it takes {' or '.join(form.elements)}"
            )
        if self.two_dimensional and not form.two_dimensional:
            raise ValueError(
                f"two_dimensional is a choice of {_formats_with('two_dimensional')}, not of {form.name}; "
                "block scaling has the format BLOCK_2D"
            )
        if (self.hadamard and not form.hadamard) or (self.stochastic and not form.stochastic):
            raise ValueError(
                f"hadamard and stochastic belong to {_formats_with('hadamard')}, not to {form.name}; drop them"
            )
        if self.two_dimensional and self.hadamard:
            raise ValueError(
                "two_dimensional needs both directions to hold the same values, hadamard transforms one "
                "of them; choose one"
            )

    def __hash__(self) -> int:
        """Of names instead of whole formats, and once: a spec is part of a key at every quantization."""
        known = self.__dict__.get("_hash")
        if known is not None:
            return known
        directions = (self.rowwise, self.columnwise, self.two_dimensional, self.hadamard, self.stochastic)
        made = hash((self.format.name, self.element.name, self.power_of_two, self.epsilon, directions))
        object.__setattr__(self, "_hash", made)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """By its fields: texts have other hashes in another process."""
        return type(self), tuple(getattr(self, field.name) for field in fields(self))

    @property
    def tile(self) -> tuple[int, int] | None:
        """(rows, K) extent of the elements that share a scale; None: the whole matrix."""
        block = self.format.block
        if block is not None and self.two_dimensional:
            return (block[1], block[1])
        return block

    @property
    def transposes(self) -> bool:
        """Is the columnwise result the exact transpose of the rowwise one?"""
        tile = self.tile
        return tile is None or tile[0] == tile[1]


def _formats_with(option: str) -> str:
    return " and ".join(form.name for form in TENSOR_FORMATS if getattr(form, option))
