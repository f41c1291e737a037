"""codes [R, K] = saturate(x * 2^(127 - e)), e = one byte for 32 elements.

OCP Microscaling Formats (MX) 1.0, with the exponent rounded up so that no element saturates.
"""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
from jax import Array

from .....common.formats import MXFP8
from .....common.warning import warn_once
from ....checks import is_symbolic
from ... import exact
from .. import e8m0, tiles
from ..float8 import cast
from ..spec import QuantizeSpec
from ..tile_scaled import tile_scaled

BLOCK = 32


def encode(x: Array, spec: QuantizeSpec, axis: int) -> tuple[Array, Array]:
    """x [*R, *K] -> codes [*R, *K], exponents float8_e8m0fnu [.., ceil(R/r), .., ceil(K/32)], one a tile of r x 32."""
    assert spec.tile is not None
    cut = tiles.cut(x, spec.tile, axis)
    amax = tiles.tile_amax(cut, axis)
    exponents = e8m0.e8m0_from_float(exact.multiply(amax, 1.0 / spec.element.maximum))
    exponents = tiles.settled(exponents)
    # 1 / 2^(e - 127) = 2^((254 - e) - 127); NaN stays NaN.
    inverse = jnp.where(exponents == e8m0.NAN, e8m0.NAN, e8m0.LARGEST - exponents)
    codes = cast(e8m0.times_power(cut.astype(jnp.float32), tiles.spread(inverse, axis)), spec.element)
    return tiles.join(codes, x.shape, axis), e8m0.to_bytes(exponents)


def check(rows: int, depth: int, spec: QuantizeSpec) -> None:
    """Warn once of a matrix whose blocks are not full; its codes are right, but NVIDIA's MXFP8 products reject it."""
    if any(not is_symbolic(extent) and extent % BLOCK for extent in (rows, depth)):
        warn_once(
            "MXFP8: partial blocks",
            f"a matrix [{rows}, {depth}] is quantized to MXFP8, whose scales cover {BLOCK} elements: blocks at the "
            f"edge are padded with zeros; pad both extents to multiples of {BLOCK}",
            stacklevel=4,
        )


def apply(values: Array, scale: Array) -> Array:
    return e8m0.times_power(values, e8m0.from_bytes(scale))


ROWS = (replace(tile_scaled(MXFP8, encode, apply), check=check),)
