"""transformer_engine.jax.flax modules in Flax NNX: bridging, differentiation, and state updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax
import jax
from flax import linen

try:
    from flax import nnx
except AttributeError as error:
    # flax 0.12.8 uses a jax.experimental name that jax 0.11.2 has removed
    raise ImportError(
        f"transformer_engine.jax.nnx: flax.nnx of flax {flax.__version__} cannot be imported beside jax "
        f"{jax.__version__} ({error}); pip install --upgrade flax"
    ) from error

from ..common.numbers import with_article
from .flax.base import one_step
from .flax.state_module import OVERWRITE_WITH_GRADIENT
from .quantize.config import NVTE_FP8_COLLECTION_NAME
from .sharding import is_mesh_available

__all__ = ["bridged", "state_type", "value_and_grad"]


def bridged(module: linen.Module, rngs: nnx.Rngs, *inputs: Any, **options: Any) -> Any:
    """Convert a linen module to an NNX module, with parameters and state created for the inputs.

    Without a mesh, its parameters' axis names stay names.

    Args:
        module: The linen module.
        rngs: NNX random streams.
        inputs: Arguments for a first call.
        options: Keyword arguments for a first call.
    """
    if not isinstance(module, linen.Module):
        raise TypeError(f"module is {with_article(type(module))}; give a module of flax.linen")
    lays = nnx.using_eager_sharding() and is_mesh_available()
    with nnx.use_eager_sharding(lays):
        return nnx.bridge.lazy_init(nnx.bridge.ToNNX(module, rngs=rngs), *inputs, **options)


def state_type(collection: str = NVTE_FP8_COLLECTION_NAME) -> type[nnx.Variable]:
    """NNX variable type for a collection.

    Args:
        collection: "fp8_metas" or "_overwrite_with_gradient".
    """
    return nnx.variable_type_from_name(collection, allow_register=True)


def value_and_grad(
    loss: Callable[..., Any], model: Any, *args: Any, has_aux: bool = False, **kwargs: Any
) -> tuple[Any, nnx.State]:
    """Compute the loss and its gradients for nnx.Params, and advance the model's quantizers by one step.

    The result is (loss(model, *args, **kwargs), gradients).

    The gradient of a state is its next state, which is written into the model. If the loss calls the model several
    times, the larger maximum counts; calls inside jit, scan or vmap within the loss must be single.

    Args:
        loss: loss(model, *args, **kwargs).
        model: The NNX model.
        args: Arguments of the loss.
        has_aux: The loss returns (value, auxiliary data), and so does this function instead of the value.
        kwargs: Keyword arguments of the loss.
    """

    def one_step_loss(model: Any, keywords: Any, *args: Any) -> Any:
        with one_step():
            return loss(model, *args, **keywords)

    states = (state_type(), state_type(OVERWRITE_WITH_GRADIENT))
    differentiated = nnx.DiffState(0, nnx.Any(nnx.Param, *states))
    value, gradients = nnx.value_and_grad(one_step_loss, argnums=differentiated, has_aux=has_aux)(
        model, kwargs, *args
    )
    parameters, following, _ = nnx.split_state(gradients, nnx.Param, nnx.Any(*states), ...)
    if jax.tree.leaves(following):
        nnx.update(model, following)
    return value, parameters
