"""codes [R, K] = e2m1(x / (s * g)): s an E4M3 scale for 16 elements, g one float32 scale for the matrix.

Two-level scaling of "Pretraining Large Language Models with NVFP4" (arXiv:2509.25149).
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from .....common.formats import E2M1, E4M3, FLOAT32_MAX, NVFP4
from ... import exact
from ...operand import Operand
from .. import tiles
from ..e2m1 import encode_e2m1
from ..float8 import absolute_maximum, cast
from ..format_row import FormatRow
from ..hadamard import GROUP, hadamard_transform
from ..spec import Given, Quantized, QuantizeSpec
from ..tile_scaled import scale_a_row
from ..triton_nvfp4 import plan

_RANGE = E2M1.maximum * E4M3.maximum


def _at_most_largest(scale: Array) -> Array:
    bits = exact.bits_of(scale)
    return exact.float_of(jnp.where(bits == exact.INFINITY, exact.bits_of_constant(FLOAT32_MAX), bits))


def global_encode_scale(amax: Array) -> Array:
    """S = 6 * 448 / amax, at most FLOAT32_MAX; 1 where amax or S is 0."""
    scale = exact.bits_of(_at_most_largest(exact.divide(_RANGE, amax)))
    idle = (exact.bits_of(amax) == 0) | (scale == 0)
    return exact.float_of(jnp.where(idle, exact.bits_of_constant(1.0), scale))


def global_decode_scale(amax: Array) -> Array:
    """g = amax / (6 * 448): a value is code * block scale * g."""
    return exact.divide(amax, jnp.full(amax.shape, _RANGE, jnp.float32))


def encode(x: Array, spec: QuantizeSpec, amax: Array, random: Array | None) -> tuple[Array, Array]:
    """x [R, K], amax [1] -> codes float4_e2m1fn [R, K], block scales e4m3 [ceil(R/r), ceil(K/16)]."""
    assert spec.tile is not None
    cut = tiles.cut(x, spec.tile)
    encode_scale = tiles.settled(global_encode_scale(amax))
    wanted = tiles.tile_amax(cut) * (encode_scale * jnp.float32(1.0 / E2M1.maximum))
    block_scale = cast(jnp.minimum(wanted, FLOAT32_MAX), E4M3)
    decode = exact.multiply(block_scale.astype(jnp.float32), exact.reciprocal(encode_scale))
    block_scale, multiplier = tiles.settled((block_scale, _at_most_largest(exact.reciprocal(decode))))
    random_tiles = None if random is None else tiles.cut(random, spec.tile)
    codes = encode_e2m1(cut.astype(jnp.float32) * tiles.spread(multiplier), random_tiles)
    return tiles.join(codes, x.shape), block_scale


def quantize(x: Array, spec: QuantizeSpec, given: Given) -> Quantized:
    """x [M, K] -> codes, block scales and maxima of the directions that spec asks for."""
    amax, amax_t = given.amax, given.amax_t
    random_rows, random_columns = (
        given.random if spec.stochastic and given.random is not None else (None, None)
    )
    codes = scales = codes_t = scales_t = None
    if amax is None and (spec.rowwise or not spec.hadamard):
        amax = absolute_maximum(x)
    if amax is not None and (spec.rowwise or spec.transposes):
        codes, scales = encode(x, spec, amax, random_rows)
    if spec.columnwise:
        if codes is not None and scales is not None and spec.transposes:
            codes_t, scales_t, amax_t = codes.T, scales.T, amax
        else:
            x_t = hadamard_transform(x.T, spec.random_sign) if spec.hadamard else x.T
            if amax_t is None:
                amax_t = absolute_maximum(x_t) if spec.hadamard else amax
            assert amax_t is not None
            codes_t, scales_t = encode(x_t, spec, amax_t, random_columns)
    return Quantized(
        codes=codes if spec.rowwise else None,
        scale=scale_a_row(scales, spec, x.shape[0]) if spec.rowwise else None,
        codes_t=codes_t,
        scale_t=scale_a_row(scales_t, spec, x.shape[1]),
        amax=amax if spec.rowwise else None,
        amax_t=amax_t if spec.columnwise else None,
    )


def dequantize(operand: Operand, scale: Array) -> Array:
    """code * block scale * global scale."""
    if operand.amax is None:
        raise ValueError(
            "an nvfp4 operand needs the tensor's amax for its second scale, which is None; "
            "pass the one that `quantize` returned"
        )
    assert NVFP4.block is not None
    codes = tiles.cut(operand.codes.astype(jnp.float32), NVFP4.block)
    # The first product has at most 6 significant bits and is exact, so only the second rounds.
    values = exact.scaled(codes * tiles.spread(scale.astype(jnp.float32)), global_decode_scale(operand.amax))
    return tiles.join(values, (operand.rows, operand.depth))


def check(rows: int, depth: int, spec: QuantizeSpec) -> None:
    """ValueError where codes do not fill bytes, or rows the transform's groups."""
    if spec.rowwise and depth % 2:
        raise ValueError(f"K={depth} FP4 codes do not fill whole bytes; pad K to a multiple of 2")
    if spec.columnwise and rows % 2:
        raise ValueError(f"M={rows} FP4 codes do not fill whole bytes; pad M to a multiple of 2")
    if spec.columnwise and spec.hadamard and rows % GROUP:
        raise ValueError(
            f"M={rows} is not a multiple of {GROUP}, the Hadamard transform's group; "
            "pad M or set hadamard=False"
        )


ROWS = (FormatRow(NVFP4, quantize, dequantize, check, plan),)
