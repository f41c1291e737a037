"""Flax modules around functions of other libraries with products in FP8, for their quantizers' state."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from ...common.checks import described, suggests_keywords, text_or_none
from ...common.numbers import with_article
from ...common.recipe import Recipe
from ..dense import dense
from ..functions.grouped_dense import grouped_dense
from ..quantize.quantizers import QuantizerSet
from .base import TransformerEngineBase

# Flax's name: TrainState replaces it by its gradient.
OVERWRITE_WITH_GRADIENT = "_overwrite_with_gradient"


@suggests_keywords
def wrap_function_in_te_state_module(
    f: Callable[..., Any],
    recipe: Recipe | None,
    name: str | None = None,
    quantization_checkpoint_name: str | None = None,
) -> type[TransformerEngineBase]:
    """Create a module class whose call runs f(generate_quantizer_set, *args, **kwargs).

    Args:
        f: The function. `generate_quantizer_set(postfix="")` returns a quantizer set, whose state is in the collection
            "_overwrite_with_gradient" of the module.
        recipe: The recipe; None means the `autocast` recipe.
        name: Suffix for the class name.
        quantization_checkpoint_name: Quantized-tensor name for recomputation policies.
    """
    if not callable(f):
        raise TypeError(f"f={described(f)} is not a function; give f(generate_quantizer_set, ..)")
    text_or_none("name", name)
    text_or_none("quantization_checkpoint_name", quantization_checkpoint_name)
    if recipe is not None and not isinstance(recipe, Recipe):
        raise TypeError(
            f"recipe={described(recipe)} is {with_article(type(recipe))}; pass an instance of a recipe's class"
        )

    class TEWrapper(TransformerEngineBase):
        """A function and the state of its quantizers."""

        @nn.compact
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            generate = functools.partial(
                self.generate_quantizer_set,
                variable_collection=OVERWRITE_WITH_GRADIENT,
                quantization_checkpoint_name=quantization_checkpoint_name,
                fp8_recipe=recipe,
            )
            return f(generate, *args, **kwargs)

    TEWrapper.__name__ = TEWrapper.__qualname__ = (
        f"TEWrapper_{name or getattr(f, '__name__', 'function')}"
    )
    return TEWrapper


@suggests_keywords
def make_dot_general_cls(quantization_recipe: Recipe | None) -> type[TransformerEngineBase]:
    """Create a class for `nn.Dense(dot_general=cls())`: products under a recipe, without batch dimensions.

    Instances accept the `jax.lax.dot_general` arguments. `flax.nnx.bridge.ToNNX` converts one for `nnx.Linear`.

    Args:
        quantization_recipe: The recipe; None means the `autocast` recipe.
    """

    def te_dot_general(
        generate_quantizer_set: Callable[..., QuantizerSet],
        x: Array,
        kernel: Array,
        dims: Any = None,
        precision: Any = None,
        preferred_element_type: Any = None,
        *,
        dimension_numbers: Any = None,
        out_sharding: Any = None,
    ) -> Array:
        # The original names the argument `dims`; flax.nnx passes the keywords of jax.lax.dot_general.
        if (dims is None) is (dimension_numbers is None):
            raise TypeError(
                f"dims={dims} and dimension_numbers={dimension_numbers} of dot_general; give one of them, for example "
                "(((1,), (0,)), ((), ()))"
            )
        contracting, batch = dimension_numbers if dims is None else dims
        if len(batch[0]) or len(batch[1]):
            raise ValueError(
                f"dot_general with the batch dimensions {batch}; the product has none, give ((), ())"
            )
        y = dense(x, kernel, contracting_dims=contracting, quantizer_set=generate_quantizer_set())
        y = y if preferred_element_type is None else y.astype(jnp.dtype(preferred_element_type))
        return y if out_sharding is None else jax.sharding.reshard(y, out_sharding)

    return wrap_function_in_te_state_module(te_dot_general, quantization_recipe, "dot_general")


@suggests_keywords
def make_grouped_dense_cls(
    quantization_recipe: Recipe | None, quantization_checkpoint_name: str | None = None
) -> TransformerEngineBase:
    """Create an instance that is called as module(x [M, K], kernel [G, K, N], group_sizes [G]).

    Args:
        quantization_recipe: The recipe; None means the `autocast` recipe.
        quantization_checkpoint_name: Quantized-tensor name for recomputation policies.
    """

    def te_grouped_dense(
        generate_quantizer_set: Callable[..., QuantizerSet],
        x: Array,
        kernel: Array,
        group_sizes: Array,
        **options: Any,
    ) -> Array:
        quantizers = generate_quantizer_set(n_groups=kernel.shape[0])
        return grouped_dense(x, kernel, group_sizes, quantizer_set=quantizers, **options)

    wrapped = wrap_function_in_te_state_module(
        te_grouped_dense, quantization_recipe, "grouped_dense", quantization_checkpoint_name
    )
    return wrapped()
