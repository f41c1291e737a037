"""Codes and scales up to one byte as unsigned integers, the form in which derivative rules save them.

A `jax.checkpoint` recomputation policy decides which values are saved. JAX inserts `lax.reduce_precision` after every
saved floating-point value. XLA computes it as for an IEEE type, which float8 and float4 dtypes are not: E4M3 codes
above 240 become NaN, and subnormal codes become 0. Integers are saved unchanged.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

Tree = TypeVar("Tree")
_INTEGERS = {8: jnp.uint8, 4: jnp.uint4}  # keyed by a floating-point dtype's bit width


@functools.partial(jax.tree_util.register_dataclass, data_fields=["bits"], meta_fields=["dtype"])
@dataclass(frozen=True)
class CodeBits:
    """Bits of a float8 or float4 array, as unsigned integers."""

    bits: Array
    dtype: jnp.dtype


def codes_to_bits(tree: Any) -> Any:
    """Convert the float8 and float4 leaves of a pytree to `CodeBits`."""
    return jax.tree.map(_to_bits, tree)


def bits_to_codes(tree: Any) -> Any:
    """Convert the `CodeBits` of a pytree back to floating-point leaves."""
    return jax.tree.map(_to_codes, tree, is_leaf=lambda node: isinstance(node, CodeBits))


def name_leaves(tree: Tree, name: str | None) -> Tree:
    """Name the leaves of a pytree for recomputation policies; float8 and float4 leaves are named as integers."""
    if name is None:
        return tree
    return bits_to_codes(
        jax.tree.map(lambda leaf: checkpoint_name(leaf, name), codes_to_bits(tree))
    )


def _to_bits(leaf: Array) -> Any:
    if not jnp.issubdtype(leaf.dtype, jnp.floating) or (bits := jnp.finfo(leaf.dtype).bits) > 8:
        return leaf
    return CodeBits(lax.bitcast_convert_type(leaf, _INTEGERS[bits]), leaf.dtype)


def _to_codes(leaf: Any) -> Any:
    return lax.bitcast_convert_type(leaf.bits, leaf.dtype) if isinstance(leaf, CodeBits) else leaf
