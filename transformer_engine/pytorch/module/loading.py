"""Loading state dicts in which extra states are absent or have names from earlier releases."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch

from ...common.recipe import Recipe
from ..quantization.family import find_family
from ..quantization.resizable_state import EXTRA_STATE
from ..tensor.quantized_tensor import QuantizedTensorStorage


def prepare(module: Any, state_dict: MutableMapping[str, Any], prefix: str) -> None:
    """Prepare a module with quantizers for loading its part of a state dict.

    Renames keys from earlier versions. If the state dict has module parameters, but no extra state or an
    empty one, the module's scales and histories are reset: they belong to other weights, and larger ones
    would saturate. A state dict without a parameter for this module, such as an adapter's, changes no scales.
    """
    for name in module.earlier_extra_states:  # from releases that kept the state in a child
        state = state_dict.pop(prefix + name, None)
        if state is not None:
            state_dict.setdefault(prefix + EXTRA_STATE, state)
    state = state_dict.get(prefix + EXTRA_STATE)
    empty = state is None or (isinstance(state, torch.Tensor) and state.numel() == 0)
    if empty and any(prefix + name in state_dict for name in module._parameters):
        _reset_scales(module)


def _reset_scales(module: Any) -> None:
    for direction in ("scaling_fwd", "scaling_bwd"):
        for delayed in module.numerics.delayed_states(direction):
            delayed.forget()


def quantized_otherwise(module: Any, recipe: Recipe | None) -> bool:
    """Return whether the module has parameters that were quantized with another recipe kind."""
    made_with = module._model_init_recipe
    if made_with is None or recipe is None or find_family(made_with) is find_family(recipe):
        return False
    return any(isinstance(param, QuantizedTensorStorage) for param in module._parameters.values())


def drop_state(module: Any, recipe: Recipe) -> None:
    """Drop a checkpoint's scaling state that belongs to another recipe than the module's quantized parameters.

    Delayed-scaling scales and histories are reset, as for a checkpoint without extra states.
    """
    made_with = type(module._model_init_recipe).__name__
    module._warn_once(
        f"state of {type(recipe).__name__}",
        f"the checkpoint's extra state of {type(module).__name__} was saved under {type(recipe).__name__} and is not "
        f"loaded, because the parameters are quantized with {made_with}; the weights are loaded and quantized anew",
    )
    _reset_scales(module)
