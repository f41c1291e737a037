"""E2M1: the eight magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign, in four bits."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from ....common.formats import E2M1


def encode_e2m1(x: Array, random: Array | None = None) -> Array:
    """float4_e2m1fn of float32 x: the nearest, ties to the even code, beyond 6 the code of 6, NaN as +6.

    With random (uniform in [0, 1), shape of x): floor(|x| + random * gap) on the grid, gap being the distance
    between the two magnitudes that enclose |x|.
    """
    x = jnp.where(jnp.isnan(x), E2M1.maximum, x)
    magnitude = jnp.abs(x)
    # The grid has gaps of 1/2 up to 2, of 1 up to 4 and of 2 up to 6: three stretches of 4, 2 and 1 codes. A
    # code is the sum of what |x| fills of the three, in units of their gaps. Every term is exact in float32.
    stretches = (
        jnp.minimum(magnitude, 2.0) * 2.0,
        jnp.clip(magnitude, 2.0, 4.0) - 2.0,
        (jnp.clip(magnitude, 4.0, 6.0) - 4.0) * 0.5,
    )
    if random is None:
        first, second, third = (jnp.round(stretch) for stretch in stretches)
        codes = first + second + third
    else:
        first, second, third = (jnp.floor(stretch) for stretch in stretches)
        whole = first + second + third
        # At most one stretch is partly filled.
        fraction = (stretches[0] - first) + (stretches[1] - second) + (stretches[2] - third)
        codes = whole + jnp.floor(fraction + random)
    sign = jnp.signbit(x).astype(jnp.uint8) << 3
    return lax.bitcast_convert_type((codes.astype(jnp.uint8) | sign).astype(jnp.uint4), jnp.float4_e2m1fn)


def codes_of(values: Array) -> Array:
    """uint8 codes 0..15 of float4_e2m1fn values, the sign in bit 3."""
    return lax.bitcast_convert_type(values, jnp.uint4).astype(jnp.uint8)
