"""Modules of transformer_engine.jax.flax in Flax NNX: bridging, differentiation, and updates of their state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax
import jax
from flax import linen

try:
    from flax import nnx
except AttributeError as error:  # flax 0.12.8 uses a name of jax.experimental that jax 0.11.2 has removed
    raise ImportError(
        f"transformer_engine.jax.nnx: flax.nnx of flax {flax.__version__} cannot be imported beside jax "
        f"{jax.__version__} ({error}); pip install --upgrade flax"
    ) from error

from .flax.base import one_step
from .flax.state_module import OVERWRITE_WITH_GRADIENT
from .quantize.config import NVTE_FP8_COLLECTION_NAME
from .sharding import is_mesh_available

__all__ = ["bridged", "state_type", "value_and_grad"]


def bridged(module: linen.Module, rngs: nnx.Rngs, *inputs: Any, **options: Any) -> Any:
    """Return the linen module as an NNX module, with parameters and state initialized for `inputs`.

    Without a mesh, the logical names of the parameters' axes are kept; NNX itself would require a mesh.
    """
    if not isinstance(module, linen.Module):
        raise TypeError(f"module is a {type(module).__name__}; give a module of flax.linen")
    lays = nnx.using_eager_sharding() and is_mesh_available()
    with nnx.use_eager_sharding(lays):
        return nnx.bridge.lazy_init(nnx.bridge.ToNNX(module, rngs=rngs), *inputs, **options)


def state_type(collection: str = NVTE_FP8_COLLECTION_NAME) -> type[nnx.Variable]:
    """Return NNX's type of the variables of a collection: "fp8_metas", or "_overwrite_with_gradient"."""
    return nnx.variable_type_from_name(collection, allow_register=True)


def value_and_grad(
    loss: Callable[..., Any], model: Any, *args: Any, has_aux: bool = False, **kwargs: Any
) -> tuple[Any, nnx.State]:
    """Return loss(model, *args, **kwargs) and the gradients of its nnx.Params; quantizers advance by one step.

    has_aux   loss returns (value, anything else), and so does this function in place of the value

    The gradient of a state is its next state, which is written into the model. If loss calls the model several times,
    the largest amax of the calls counts; calls inside of jit, scan or vmap within loss must be a single one.
    """

    def of_one_step(model: Any, keywords: Any, *args: Any) -> Any:
        with one_step():
            return loss(model, *args, **keywords)

    states = (state_type(), state_type(OVERWRITE_WITH_GRADIENT))
    wanted = nnx.DiffState(0, nnx.Any(nnx.Param, *states))
    value, gradients = nnx.value_and_grad(of_one_step, argnums=wanted, has_aux=has_aux)(model, kwargs, *args)
    parameters, following, _ = nnx.split_state(gradients, nnx.Param, nnx.Any(*states), ...)
    if jax.tree.leaves(following):
        nnx.update(model, following)
    return value, parameters
