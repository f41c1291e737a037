"""The policy for extra state in checkpoints: which recipes have state, and which bytes a module reads.

NVIDIA's engine unpickles extra state only with NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1. Here it is read
through an allow-list and no checkpoint code runs, so that no permission is needed. Missing or older
entries: `module/loading.py`.
"""

from __future__ import annotations

import torch

from ..common.checks import described
from ..common.recipe import Recipe
from .quantization.extra_state import ExtraStateError, decode_extra_state
from .quantization.family import find_family

__all__ = ["UNSAFE_PICKLE_EXTRA_STATE_ENV", "is_stateless_recipe", "should_load_extra_state_pickle"]

UNSAFE_PICKLE_EXTRA_STATE_ENV = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"


def is_stateless_recipe(recipe: Recipe) -> bool:
    """Return whether layers under a recipe have no scaling state, so that their extra state is empty.

    Args:
        recipe: Any recipe. Only delayed scaling, and a custom recipe that may request it, has state.

    Raises:
        TypeError: The value is not a recipe.
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(f"recipe={described(recipe)} is not a Recipe; give an instance of one")
    return not find_family(recipe).stateful


def should_load_extra_state_pickle(state_bytes: bytes, context: str = "module") -> bool:
    """Return whether the pickled extra state of a checkpoint has scaling state that a module reads.

    Args:
        state_bytes: Contents of an `_extra_state` entry.
        context: Module name, for the message.

    Returns:
        True for delayed-scaling state; False for an empty one, and for the state of a stateless
        recipe, which is ignored.

    Raises:
        RuntimeError: The bytes are damaged, or name something that a checkpoint may not load. There is no permission
            that allows it, NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE included.
    """
    if not state_bytes:
        return False
    data = torch.frombuffer(bytearray(state_bytes), dtype=torch.uint8)
    try:
        decoded = decode_extra_state(data)
    except ExtraStateError as error:
        raise RuntimeError(
            f"the extra state of {context} is not loaded: {error} ({UNSAFE_PICKLE_EXTRA_STATE_ENV} has no effect)"
        ) from error
    return decoded is not None and not is_stateless_recipe(decoded["recipe"])
