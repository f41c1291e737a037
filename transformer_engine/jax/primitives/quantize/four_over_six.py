"""4over6: each tile's maximum maps to 6, or to 4 if that codes the tile with a smaller error.

The choice can depend on the last bit of an error, so errors are computed as in IEEE float32 arithmetic. XLA for a CPU
would flush subnormal numbers to zero, divide by constants through their inverses, and fuse products with sums. Products
and quotients come from `exact`; differences and sums use values multiplied by a power of two that keeps them normal.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from ....common.formats import E2M1, E4M3
from ....common.quantize_spec import FAST_MAE, FAST_MSE, MSE
from .. import exact
from . import tiles
from .elements import cast, encode_e2m1

Coding = tuple[Array, Array, Array]  # tile codes, their scales, each tile's error


def encode(
    blocks: Array,
    axis: int,
    measure: str,
    largest: float,
    amax: Array,
    encode_scale: Array,
    multiplier_of: Callable[[Array], Array],
) -> tuple[Array, Array]:
    """Encode the tiles `blocks` to codes and e4m3 scales.

    Args:
        blocks: Tiles [.., R, r, .., K, c] as `tiles.cut` makes them; `axis` is the matrix's.
        axis: First column axis of the matrix.
        measure: A `BLOCK_ERRORS` entry.
        largest: 6 times the largest block scale.
        amax: The maxima from which second-level scales are computed, with as many dimensions as the tiles' scales.
        encode_scale: The second-level scales, in the same shape.
        multiplier_of: Maps E4M3 block scales to value multipliers.
    """
    base = exact.multiply(
        exact.divide(tiles.tile_amax(blocks, axis), jnp.float32(E2M1.maximum)), encode_scale
    )
    six, four = (
        _encode_candidate(blocks, axis, ideal, measure, largest, amax, encode_scale, multiplier_of)
        for ideal in (base, exact.multiply(base, 1.5))
    )
    takes_four = four[2] < six[2]
    return (
        jnp.where(tiles.spread(takes_four, axis), four[0], six[0]),
        jnp.where(takes_four, four[1], six[1]),
    )


def _encode_candidate(
    blocks: Array,
    axis: int,
    ideal: Array,
    measure: str,
    largest: float,
    amax: Array,
    encode_scale: Array,
    multiplier_of: Callable[[Array], Array],
) -> Coding:
    """Encode blocks with one candidate scale; also return the error of each block."""
    scale = cast(ideal, E4M3)
    scale, multiplier = tiles.materialize_scales((scale, multiplier_of(scale)))
    codes = encode_e2m1(blocks.astype(jnp.float32) * tiles.spread(multiplier, axis), None)
    # At most 6 significant bits, from 2^-10 on: exact.
    product = jnp.abs(codes.astype(jnp.float32)) * tiles.spread(scale.astype(jnp.float32), axis)
    # A code has its value's sign, so that magnitude differences equal value differences.
    values = exact.bits_to_float(exact.magnitude_bits(blocks))
    of_tiles = tiles.spread(amax, axis), tiles.spread(encode_scale, axis)
    if measure in (FAST_MAE, FAST_MSE):
        difference = jnp.abs(product - exact.multiply(values, of_tiles[1]))
        terms = exact.multiply(difference, difference) if measure == FAST_MSE else difference
    else:
        # |product * amax / largest - values|, or its square, times a power of two that only depends on amax.
        amax = of_tiles[0]
        exponent = ((exact.float_bits(amax) >> 23) & 0xFF) - 127
        lift = jnp.clip(-exponent, 0, 100)
        decoded = exact.divide(exact.multiply(product, amax), jnp.float32(largest))
        difference = jnp.abs(
            exact.multiply(decoded, _power(lift)) - exact.multiply(values, _power(lift))
        )
        terms = difference
        if measure == MSE:
            difference = exact.multiply(difference, _power(-lift))
            terms = exact.multiply(
                exact.multiply(difference, difference), _power(jnp.minimum(2 * lift, 100))
            )
    # Sum over each tile: along a row from the first element on, then rows 0 with 8, 1 with 9, .., 0 with 4, ..
    columns = jnp.moveaxis(terms, -1, 0)
    total = columns[0]
    for index in range(1, columns.shape[0]):
        total = total + columns[index]
    rows = jnp.moveaxis(total, axis, 0)
    while rows.shape[0] > 1:
        half = rows.shape[0] // 2
        rows = rows[:half] + rows[half:]
    return codes, scale, rows[0]


def _power(exponent: Array) -> Array:
    """Compute 2^exponent, for -126 to 127."""
    return exact.bits_to_float((exponent + 127) << 23)
