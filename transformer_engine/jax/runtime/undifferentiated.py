"""Results computed from codes have no derivative, and an attempt to differentiate them raises an error.

JAX would not raise: it transposes a conversion to FP8 by rounding the cotangent to FP8 without a scale, so that 1e-4
becomes 0, and it treats values that are computed from bits as constants. Derivative rules are differentiated themselves
for second derivatives.
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

Tree = TypeVar("Tree")


def constant(tree: Tree) -> Tree:
    """Stop a pytree's derivatives, for quantization, whose kernels have no derivative rules."""
    return lax.stop_gradient(tree)


def undifferentiated(gradients: Tree, of: Any) -> Tree:
    """Mark a pytree that was computed from codes of the arrays `of`; raise an error if it is differentiated.

    Raises:
        NotImplementedError: A cotangent reaches the arrays, and `of` is differentiated. Arrays after `stop_gradient`,
            or outside the differentiated function, do not raise.
    """
    tied: Any = _tie_arrays(gradients, of)
    return tied


@jax.jit  # one program with an empty result: in eager mode the separate operations would copy the array
def like(array: Array) -> Array:
    """Create an empty array [0, *shape], with an array's dtype, that depends on it for JAX."""
    return jnp.expand_dims(array, 0)[:0]


@jax.custom_vjp
def _tie_arrays(gradients: Any, of: Any) -> Any:
    return gradients


def _raise(of: Any, cotangent: Any) -> Any:
    shapes = ", ".join(f"{list(array.shape)} {array.dtype}" for array in jax.tree.leaves(of))
    raise NotImplementedError(
        f"an array computed from codes, of {shapes}, is differentiated, and codes have no derivative. For a second "
        "derivative trace both under te.autocast(enabled=False); for the gradient of y = dequantize(quantize(x)) write "
        "x + jax.lax.stop_gradient(y - x)"
    )


_tie_arrays.defvjp(lambda made, of: (made, of), _raise)
