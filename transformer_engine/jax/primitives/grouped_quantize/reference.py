"""A stack's codes in plain jnp operations, for any extents."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from ....common.dispatch import Backend
from ....common.formats import Element
from .. import exact
from ..quantize import cast, given_multiplier
from ..quantize.tiles import settled
from .request import StackCodes, StackRequest


def run(x: Array, multiplier: Array, element: Element, directions: tuple[bool, bool]) -> StackCodes:
    """See `quantize_stack`."""
    multiplier = given_multiplier(multiplier)
    codes = cast(x.astype(jnp.float32) * multiplier[:, None, None], element)
    amax = exact.float_of(exact.magnitude_bits(x).max(axis=(1, 2), initial=0))
    rowwise, columnwise = directions
    return StackCodes(
        codes if rowwise else None,
        jnp.swapaxes(codes, 1, 2) if columnwise else None,
        settled(exact.reciprocal(multiplier)),
        amax,
    )


BACKEND = Backend[StackRequest]("reference", bind=lambda request: run)
