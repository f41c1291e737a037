"""What every function of arrays asks of its arguments before it computes."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, export
from jax.core import Tracer
from jax.sharding import AxisType

from ..common.checks import described, integer, number, whole, whole_numbers


def check_array(name: str, array: Any) -> None:
    """TypeError unless this is an array."""
    if getattr(array, "dtype", None) is None or getattr(array, "shape", None) is None:
        raise TypeError(f"{name}={described(array)} is a {type(array).__name__}; give an array")


def check_values(name: str, array: Any) -> None:
    """TypeError unless an array holds float32, bfloat16 or float16."""
    dtype = getattr(array, "dtype", None)
    if dtype is None or dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise TypeError(f"{name} is {described(array)}; it must hold float32, bfloat16 or float16, cast it")
    if isinstance(array, jax.Array):  # a traced one too
        _warn_of_axes(name, jax.typeof(array).sharding)


def _warn_of_axes(name: str, sharding: Any) -> None:
    kinds = dict(zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True))
    entries = (entry if isinstance(entry, tuple) else (entry,) for entry in sharding.spec)
    cut = [axis for entry in entries for axis in entry if kinds.get(axis) is AxisType.Explicit]
    if any(sharding.mesh.shape[axis] > 1 for axis in cut):
        _warn_of_explicit_axes(name, tuple(cut))


@functools.cache
def _warn_of_explicit_axes(name: str, axes: tuple[str, ...]) -> None:
    """Once a process and argument, of what jax.make_mesh makes unless it is told otherwise."""
    warnings.warn(
        f"{name} is cut over the axes {', '.join(axes)} of a mesh, which are of the type Explicit: jax may refuse its "
        "products and gradients (ShardingTypeError), and every device computes the whole of what it does not refuse; "
        "make the mesh with axis_types=(jax.sharding.AxisType.Auto,) for each axis",
        stacklevel=4,
    )


def check_shaped(name: str, array: Any, shape: Sequence[int]) -> None:
    """TypeError or ValueError unless an array of this shape holds float32, bfloat16 or float16."""
    check_values(name, array)
    if tuple(array.shape) != tuple(shape):
        raise ValueError(f"{name} has shape {tuple(array.shape)}; it must be {tuple(shape)}")


def check_dtype(name: str, dtype: Any) -> Any:
    """Return the dtype of a scalar class, a name or a dtype; raise TypeError unless arrays of JAX can have it."""
    try:
        # NumPy converts {} and [] to dtypes without fields, which are not numbers.
        if (
            dtype is not None
            and (found := jnp.dtype(dtype)).kind not in "OSUMm"
            and found.type is not np.void
        ):
            return found
    except (TypeError, ValueError):
        pass  # NumPy's message does not contain the name of the argument
    raise TypeError(f"{name}={described(dtype)} is not a dtype of arrays; pass one such as jnp.float32")


def check_floating(name: str, dtype: Any) -> Any:
    """The dtype of floating-point numbers; TypeError for others."""
    found = check_dtype(name, dtype)
    if not jnp.issubdtype(found, jnp.floating):
        raise TypeError(f"{name}={found.name} is no floating-point type; give jnp.float32")
    return found


def check_axis_pairs(name: str, dims: Any) -> None:
    """TypeError or ValueError unless dims are two sequences of whole numbers, axes of either array."""
    if not isinstance(dims, (tuple, list)) or len(dims) != 2:
        raise ValueError(f"{name}={described(dims)}; give two sequences of axes, such as ((1,), (0,))")
    for side in dims:
        whole_numbers(name, side)


def check_sizes(name: str, sizes: Any, count: int | None, rows: int) -> None:
    """TypeError or ValueError unless sizes [count] are whole numbers >= 0 of at most `rows`; of sizes
    that are not known here (traced, or laid over several processes), the shape alone.

    count   how many there have to be; None: any number
    """
    check_integers(name, sizes)
    if len(sizes.shape) != 1 or count not in (None, sizes.shape[0]):
        raise ValueError(
            f"{name}={described(sizes)}; give {'a vector of' if count is None else count} whole numbers, the rows of "
            "each"
        )
    if not is_known(sizes):
        return
    found = np.asarray(sizes).astype(np.int64)
    if found.min(initial=0) < 0:
        raise ValueError(f"{name} holds {found.min()}, which is below 0; give 0 for what has no rows")
    if found.sum() > rows:
        raise ValueError(f"{name} add up to {found.sum()} of {rows} rows; give sizes of at most {rows} rows")


def is_known(array: Any) -> bool:
    """Can its values be read here? Not those of a traced array, nor of one that is laid over several processes."""
    if isinstance(array, Tracer):
        return False
    return not isinstance(array, Array) or array.is_fully_addressable or array.is_fully_replicated


def is_symbolic(extent: Any) -> bool:
    """Is it an extent of `jax.export.symbolic_shape`, which stands for many sizes?"""
    return export.is_symbolic_dim(extent)


def check_extent(name: str, extent: Any, reason: str) -> None:
    """TypeError or ValueError unless this is a known number of at least 1; reason: why a symbol does not do."""
    if is_symbolic(extent):
        raise ValueError(
            f"{name}={extent} is symbolic, and {reason}; export with a number there, once for each length"
        )
    whole(name, extent)


def check_integers(name: str, array: Any) -> None:
    """TypeError unless an array holds whole numbers."""
    dtype = getattr(array, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(f"{name} is {described(array)}; give an array of integers, such as int32")


def check_integer(name: str, value: Any) -> None:
    """TypeError unless this is a whole number, or an array of no axes that holds one; it may be traced."""
    if getattr(value, "dtype", None) is not None and getattr(value, "shape", None) == ():
        check_integers(name, value)
    else:
        integer(name, value)


def check_key(name: str, key: Any) -> None:
    """TypeError unless this is a key of jax.random, typed or as its words (uint32 [2] by default)."""
    dtype = getattr(key, "dtype", None)
    if dtype is None or not (jnp.issubdtype(dtype, jax.dtypes.prng_key) or dtype == jnp.uint32):
        raise TypeError(f"{name}={described(key)} is no key of jax.random; give jax.random.key(0)")


def check_instance(name: str, value: Any, kind: type) -> None:
    """TypeError unless value is a `kind`."""
    if not isinstance(value, kind):
        raise TypeError(f"{name}={described(value)} is a {type(value).__name__}; give a {kind.__name__}")


def check_optional(name: str, value: Any, kind: type) -> None:
    """TypeError unless value is None or a `kind`."""
    if value is not None:
        check_instance(name, value, kind)


def check_bias(bias: Array | None, features: Sequence[int]) -> None:
    """TypeError or ValueError unless a bias is one number a feature."""
    if bias is None:
        return
    check_values("bias", bias)
    if tuple(bias.shape) != tuple(features):
        raise ValueError(
            f"bias has shape {tuple(bias.shape)}; it must be {tuple(features)}, one number a feature"
        )


def broadcasts(shape: Sequence[int], extents: Sequence[int]) -> bool:
    """Has a shape these extents, or 1 in place of one?"""
    return len(shape) == len(extents) and all(n in (1, m) for n, m in zip(shape, extents, strict=True))


def check_rate(name: str, value: Any) -> None:
    """TypeError or ValueError unless this is a rate of dropout in [0, 1]; Flax's dropout of rate 1 returns zeros."""
    number(name, value)
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name}={value} is outside [0, 1]; give the share of elements to drop")


def check_mask(mask: Any, scores: Sequence[int]) -> None:
    """TypeError or ValueError unless a mask has an element for every score [b, h, q, k], or 1 in place of an extent."""
    if getattr(mask, "dtype", None) is None or getattr(mask, "shape", None) is None:
        raise TypeError(f"mask={described(mask)}; give an array, True of which hides a key")
    if not broadcasts(mask.shape, scores):
        raise ValueError(
            f"the mask has shape {mask.shape}; it must be {tuple(scores)}, or 1 in place of an extent"
        )


def check_axis_names(name: str, axes: Any, ndim: int) -> None:
    """TypeError or ValueError unless there is one name an axis, or none at all (None or an empty sequence)."""
    if axes is None:
        return
    if isinstance(axes, str) or not hasattr(axes, "__len__") or hasattr(axes, "dtype"):
        raise TypeError(f"{name}={described(axes)}; give a tuple of one name, or None, an axis")
    if len(axes) and len(axes) != ndim:
        raise ValueError(
            f"{name}={tuple(axes)} names {len(axes)} axes of {ndim}; give one name, or None, an axis"
        )
