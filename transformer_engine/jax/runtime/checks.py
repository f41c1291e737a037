"""Validation for array functions' arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, export
from jax.core import Tracer

from ...common.checks import described, integer, integers, number, whole
from ...common.numbers import with_article


def check_array(name: str, array: Any) -> None:
    """Raise TypeError unless a value is an array."""
    if getattr(array, "dtype", None) is None or getattr(array, "shape", None) is None:
        raise TypeError(f"{name}={described(array)} is {with_article(type(array))}; give an array")


def check_values(name: str, array: Any) -> None:
    """Raise TypeError unless a value is a float32, bfloat16 or float16 array."""
    dtype = getattr(array, "dtype", None)
    if dtype is None or dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        if dtype is not None and not isinstance(array, Array) and not isinstance(dtype, np.dtype):
            raise TypeError(
                f"{name} is {described(array)}, which JAX does not read; convert it by jnp.asarray"
            )
        raise TypeError(
            f"{name} is {described(array)}; it must hold float32, bfloat16 or float16, cast it"
        )


def check_shaped(name: str, array: Any, shape: Sequence[int]) -> None:
    """Raise TypeError or ValueError unless a value is a float32, bfloat16 or float16 array with this shape."""
    check_values(name, array)
    if tuple(array.shape) != tuple(shape):
        raise ValueError(f"{name} has shape {tuple(array.shape)}; it must be {tuple(shape)}")


def check_dtype(name: str, dtype: Any) -> Any:
    """Convert a scalar class, a name or a dtype to a dtype; raise TypeError unless JAX arrays can have it."""
    try:
        canonical = None if dtype is None else jnp.dtype(dtype)
    except (TypeError, ValueError):
        canonical = None  # NumPy's message does not contain the argument name
    # NumPy converts {} and [] to structured dtypes without fields.
    if canonical is None or canonical.kind in "OSUMm" or canonical.type is np.void:
        raise TypeError(
            f"{name}={described(dtype)} is not a dtype of arrays; pass one such as jnp.float32"
        )
    return canonical


def check_floating(name: str, dtype: Any) -> Any:
    """Convert as `check_dtype`; raise TypeError unless the dtype is floating-point."""
    canonical = check_dtype(name, dtype)
    if not jnp.issubdtype(canonical, jnp.floating):
        raise TypeError(
            f"{name}={canonical.name} is not a floating-point dtype; pass one such as jnp.float32"
        )
    return canonical


def check_axis_pairs(name: str, dims: Any) -> None:
    """Raise TypeError or ValueError unless dims is a pair of integer sequences, one per array."""
    if not isinstance(dims, (tuple, list)) or len(dims) != 2:
        raise ValueError(
            f"{name}={described(dims)}; give two sequences of axes, such as ((1,), (0,))"
        )
    for side in dims:
        integers(name, side)


def check_sizes(name: str, sizes: Any, count: int | None, rows: int) -> None:
    """Validate the row counts of groups.

    Values are not checked if the array is traced or sharded over several processes.

    Args:
        name: Argument name for messages.
        sizes: Rows per group, integers [count].
        count: Required number of groups; None allows any number.
        rows: Largest allowed sum.

    Raises:
        TypeError: sizes is not an integer array.
        ValueError: The shape does not match, a size is negative, or the sum is above rows.
    """
    check_integers(name, sizes)
    if len(sizes.shape) != 1 or count not in (None, sizes.shape[0]):
        raise ValueError(
            f"{name}={described(sizes)}; give {'a vector of' if count is None else count} whole numbers, the rows of "
            "each"
        )
    if not is_known(sizes):
        return
    integers = np.asarray(sizes).astype(np.int64)
    if integers.min(initial=0) < 0:
        raise ValueError(
            f"{name} holds {integers.min()}, which is below 0; give 0 for a group without rows"
        )
    if integers.sum() > rows:
        raise ValueError(
            f"{name} add up to {integers.sum()} of {rows} rows; give sizes of at most {rows} rows"
        )


def is_known(array: Any) -> bool:
    """Whether values can be read: not in a tracer or an array sharded over several processes."""
    if isinstance(array, Tracer):
        return False
    return not isinstance(array, Array) or array.is_fully_addressable or array.is_fully_replicated


def is_symbolic(extent: Any) -> bool:
    """Whether an extent is a symbolic `jax.export` dimension."""
    return export.is_symbolic_dim(extent)


def check_extent(name: str, extent: Any, reason: str) -> None:
    """Raise TypeError or ValueError unless an extent is an integer from 1 on; reason explains why not a symbol."""
    if is_symbolic(extent):
        raise ValueError(
            f"{name}={extent} is symbolic, and {reason}; export with a number there, once for each length"
        )
    whole(name, extent)


def check_integers(name: str, array: Any) -> None:
    """Raise TypeError unless a value is an integer array."""
    dtype = getattr(array, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(f"{name} is {described(array)}; give an array of integers, such as int32")


def check_integer(name: str, value: Any) -> None:
    """Raise TypeError unless a value is an integer, or an integer array without axes, which may be traced."""
    if getattr(value, "dtype", None) is not None and getattr(value, "shape", None) == ():
        check_integers(name, value)
    else:
        integer(name, value)


def check_key(name: str, key: Any) -> None:
    """Raise TypeError unless a value is a jax.random key, typed or raw (uint32 [2] by default)."""
    dtype = getattr(key, "dtype", None)
    if dtype is None or not (jnp.issubdtype(dtype, jax.dtypes.prng_key) or dtype == jnp.uint32):
        raise TypeError(
            f"{name}={described(key)} is not a key of jax.random; pass one such as jax.random.key(0)"
        )


def check_instance(name: str, value: Any, kind: type) -> None:
    """Raise TypeError unless value is an instance of kind."""
    if not isinstance(value, kind):
        raise TypeError(
            f"{name}={described(value)} is {with_article(type(value))}; give {with_article(kind)}"
        )


def check_optional(name: str, value: Any, kind: type) -> None:
    """Raise TypeError unless value is None or an instance of kind."""
    if value is not None:
        check_instance(name, value, kind)


def check_bias(bias: Array | None, features: Sequence[int]) -> None:
    """Raise TypeError or ValueError unless a bias is None or has the shape `features`."""
    if bias is None:
        return
    check_values("bias", bias)
    if tuple(bias.shape) != tuple(features):
        raise ValueError(
            f"bias has shape {tuple(bias.shape)}; it must be {tuple(features)}, one number per feature"
        )


def broadcasts(shape: Sequence[int], extents: Sequence[int]) -> bool:
    """Whether a shape has these extents, or 1 instead."""
    return len(shape) == len(extents) and all(
        n in (1, m) for n, m in zip(shape, extents, strict=True)
    )


def check_rate(name: str, value: Any) -> None:
    """Raise TypeError or ValueError unless a dropout rate is in [0, 1]; rate 1 returns zeros, as in Flax."""
    number(name, value)
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name}={value} is outside [0, 1]; give the fraction of elements to drop")


def check_mask(mask: Any, scores: Sequence[int]) -> None:
    """Raise TypeError or ValueError unless a mask is an array that broadcasts to the scores [b, h, q, k]."""
    if getattr(mask, "dtype", None) is None or getattr(mask, "shape", None) is None:
        raise TypeError(f"mask={described(mask)}; give an array, True of which hides a key")
    if not broadcasts(mask.shape, scores):
        raise ValueError(
            f"the mask has shape {mask.shape}; it must be {tuple(scores)}, or 1 in place of an extent"
        )


def check_axis_names(name: str, axes: Any, ndim: int) -> None:
    """Raise TypeError or ValueError unless axes is empty, None, or one name or None per axis."""
    if axes is None:
        return
    if isinstance(axes, str) or not hasattr(axes, "__len__") or hasattr(axes, "dtype"):
        raise TypeError(f"{name}={described(axes)}; give a tuple of one name, or None, per axis")
    if len(axes) and len(axes) != ndim:
        raise ValueError(
            f"{name}={tuple(axes)} names {len(axes)} axes of {ndim}; give one name, or None, per axis"
        )
