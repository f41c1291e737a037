"""explain(function, *args): which backend each operation of a call uses, and why others are unsupported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..common.checks import function as checked_function
from ..common.checks import switch
from ..common.explanation import Explanation, explain_call

__all__ = ["Explanation", "explain"]


def explain(
    function: Callable[..., Any], *args: Any, backward: bool = True, **kwargs: Any
) -> Explanation:
    """Trace function(*args, **kwargs) and report which backend every operation uses.

    Nothing is computed. Each choice is reported for this machine and for the other platform that the program may be
    lowered for; the requests name the platform.

    Args:
        function: Array function, such as `model.apply`.
        *args: Arguments of the function.
        backward: Whether to also trace the gradient with respect to args, for the sum of the first result.
        **kwargs: Keyword arguments of the function.

    Returns:
        The choices and the reasons why other backends are unsupported.
    """
    checked_function("function", function)
    switch("backward", backward)
    traced: Any = function
    if hasattr(function, "lower") and hasattr(function, "__wrapped__"):
        traced = function.__wrapped__  # pyright: ignore[reportFunctionMemberAccess]  # a cached jax.jit trace would not choose backends again

    def run(*args: Any) -> Any:
        if not backward:
            return traced(*args, **kwargs)
        leaves, tree = jax.tree.flatten(args)
        floats = [
            index for index, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)
        ]

        def first(*values: Any) -> Any:
            filled = list(leaves)
            for index, value in zip(floats, values, strict=True):
                filled[index] = value
            return jax.tree.leaves(traced(*jax.tree.unflatten(tree, filled), **kwargs))[0]

        out, pullback = jax.vjp(first, *(leaves[index] for index in floats))
        return pullback(jnp.ones_like(out))

    return explain_call(lambda: jax.eval_shape(run, *args))
