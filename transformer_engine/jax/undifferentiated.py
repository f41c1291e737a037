"""What is made of codes has no derivative, and who asks for one is told so.

JAX would not: it transposes a conversion to FP8 by rounding the cotangent itself to FP8, without a scale, so that
1e-4 comes back as 0; and what is read off bits counts as a constant. Rules of differentiation are themselves
differentiated where a second derivative is asked for.
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

Made = TypeVar("Made")


def constant(tree: Made) -> Made:
    """The arrays of a pytree as the makers of codes read them: kernels have no rule of differentiation to ask."""
    return lax.stop_gradient(tree)


def undifferentiated(made: Made, of: Any) -> Made:
    """The arrays of a pytree as they are, made of codes of the arrays `of`.

    NotImplementedError where a cotangent reaches them and `of` is differentiated. What is made and goes through
    `stop_gradient`, or is no part of the function that is differentiated, disturbs nobody.
    """
    tied: Any = _tied(made, of)
    return tied


@jax.jit  # one program, whose result is empty: step by step an eager caller would copy the array
def like(array: Array) -> Array:
    """[0, *shape]: no elements, but the shape and dtype of an array, and to JAX something that depends on it."""
    return jnp.expand_dims(array, 0)[:0]


@jax.custom_vjp
def _tied(made: Any, of: Any) -> Any:
    return made


def _forward(made: Any, of: Any) -> tuple[Any, Any]:
    return made, of


def _refuse(of: Any, cotangent: Any) -> Any:
    shapes = ", ".join(f"{list(array.shape)} {array.dtype}" for array in jax.tree.leaves(of))
    raise NotImplementedError(
        f"what was made of codes, of {shapes}, is differentiated, and codes have no derivative. For a second "
        "derivative trace both under te.autocast(enabled=False); for the gradient of y = dequantize(quantize(x)) write "
        "x + jax.lax.stop_gradient(y - x)"
    )


_tied.defvjp(_forward, _refuse)
