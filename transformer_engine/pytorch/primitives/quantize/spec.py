"""What a quantization is asked for, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ....common.formats import E2M1, E4M3, E5M2, TENSOR_FORMATS, Element, TensorFormat

_TORCH_DTYPES = {E4M3.name: torch.float8_e4m3fn, E5M2.name: torch.float8_e5m2, E2M1.name: torch.uint8}


def torch_dtype(element: Element) -> torch.dtype:
    """The torch dtype that holds an element's codes (E2M1: uint8, two codes a byte)."""
    return _TORCH_DTYPES[element.name]


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
        """Of names instead of whole formats: a spec is part of a key at every quantization."""
        directions = (self.rowwise, self.columnwise, self.two_dimensional, self.hadamard, self.stochastic)
        return hash((self.format.name, self.element.name, self.power_of_two, self.epsilon, directions))

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


class Cast(NamedTuple):
    """How an operation quantizes what it makes: asked of a quantizer, handed to the operation.

    multiplier   FLOAT8: float32 [1] that values are multiplied with; None: made from them
    record       with a multiplier: float32 [1] that keeps the larger of itself and the absolute maximum
    """

    spec: QuantizeSpec
    multiplier: Tensor | None = None
    record: Tensor | None = None


class Quantized(NamedTuple):
    """The matrix [M, K] in narrow codes; None where a direction was not asked for.

    codes    [M, K] float8, NVFP4 uint8 [M, K / 2];   scale    how `Operand` describes it for [M, K]
    codes_t  [K, M] float8, NVFP4 uint8 [K, M / 2];   scale_t  the same for the transposed matrix [K, M]
    amax     float32 [1]: FLOAT8 and NVFP4, the absolute maximum that the row direction was scaled by
    amax_t   float32 [1]: NVFP4, the same for the column direction, after the Hadamard transform if any
    """

    codes: Tensor | None = None
    scale: Tensor | None = None
    codes_t: Tensor | None = None
    scale_t: Tensor | None = None
    amax: Tensor | None = None
    amax_t: Tensor | None = None


@dataclass(frozen=True)
class Request:
    """What a backend may decide on: the spec and the matrix's shape, dtype and device; never its values."""

    spec: QuantizeSpec
    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    scale_given: bool = False
