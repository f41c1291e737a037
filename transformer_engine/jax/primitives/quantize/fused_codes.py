"""FP8 codes that a kernel makes of its own result: whether it may, and how it is told.

Codes, scales and maxima are those of the separate steps: the result is rounded to its dtype before it is scaled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp

from ....common.formats import BLOCK_1D, BLOCK_2D, FLOAT8
from . import triton
from .float8 import value_for_inf
from .spec import QuantizeSpec, Request

if TYPE_CHECKING:
    from ....common.kernels.block_cast import Blocks
    from ....common.kernels.cast import OneScale

_FORMATS = (FLOAT8, BLOCK_1D, BLOCK_2D)


def refuses(request: Request) -> str | None:
    """Why no kernel makes these codes where it makes their values."""
    if request.spec.format not in _FORMATS:
        return f"format {request.spec.format.name}; kernels make codes of FLOAT8 and of blocks where values are made"
    if not request.spec.rowwise:
        return "column-wise codes alone; kernels make row-wise ones too"
    return triton.refuses(request)


def in_blocks(spec: QuantizeSpec) -> bool:
    """Has every block a scale of its own, so that a kernel that holds one needs to know nothing else?"""
    return spec.format.block is not None


def one_scale(spec: QuantizeSpec) -> OneScale:
    """A cast by a given scale, of which 0 is read as 1, as kernels take it; the maximum is found on the way."""
    from ....common.kernels.cast import OneScale  # it imports triton

    return OneScale(
        spec.element, spec.columnwise, True, False, spec.power_of_two, spec.epsilon, zero_is_one=True
    )


def blocks(spec: QuantizeSpec, dtype: jnp.dtype) -> Blocks:
    """The spec as kernels take it, for a result that is rounded to dtype."""
    from ....common.kernels.block_cast import Blocks  # it imports triton

    square = spec.format == BLOCK_2D
    scaling = (spec.power_of_two, spec.epsilon, value_for_inf(dtype))
    return Blocks(spec.element, spec.columnwise, square, *scaling)
