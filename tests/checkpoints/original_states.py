"""State dicts in the formats of releases 1.x and 2.x of the original.

Each module's `_extra_state` is a pickled dict. Releases differ in the key of the attention's dict, in whether the dict
has the recipe, and in the container of the bytes.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from transformer_engine.common.recipe import DelayedScaling, Format, Recipe

HISTORY = 16
# Slots of each module of a TransformerLayer: inputs, weights and outputs, and gradients.
SLOTS = {
    "self_attention.layernorm_qkv": (3, 2),
    "self_attention.proj": (3, 2),
    "layernorm_mlp": (6, 4),
}
ATTENTION = "self_attention.core_attention"


def scales(count: int, seed: int) -> Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed)) * 100 + 1


def histories(count: int, seed: int) -> Tensor:
    return torch.rand(HISTORY, count, generator=torch.Generator().manual_seed(seed + 1000))


def _recipe() -> DelayedScaling:
    recipe = DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=HISTORY)
    vars(recipe).pop("_description", None)  # of this package only
    return recipe


def module_state(
    forward: int, backward: int, *, with_recipe: bool, with_inverse: bool
) -> dict[str, Any]:
    """Return the dict of one module under delayed scaling."""
    state: dict[str, Any] = {
        "scale_fwd": scales(forward, 1),
        "amax_history_fwd": histories(forward, 1),
        "scale_bwd": scales(backward, 2),
        "amax_history_bwd": histories(backward, 2),
        "extra_fp8_variables": {
            "fp8_checkpoint": True,
            "num_gemms": forward // 3,
            "fp8_max_fwd": 448.0,
            "fp8_max_bwd": 57344.0,
        },
    }
    if with_inverse:
        state |= {"scale_inv_fwd": 1 / state["scale_fwd"], "scale_inv_bwd": 1 / state["scale_bwd"]}
        state["extra_fp8_variables"]["global_fp8_buffer_pos_fwd_recompute"] = 1
    if with_recipe:
        state["recipe"] = _recipe()
    return state


def archive_state(state: dict[str, Any]) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer


def state_bytes(state: dict[str, Any]) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)


def empty(*_: Any) -> Tensor:
    return torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True)
class Release:
    """The format of a range of releases.

    Attributes:
        container: Container of the bytes of an extra state.
        attention: Key of the attention's extra state; None if it has none.
        recipe: The extra state contains the recipe.
        inverse: The extra state contains reciprocal scales.
    """

    container: Callable[[dict[str, Any]], Any]
    attention: str | None
    recipe: bool
    inverse: bool


RELEASES = {
    "1.0-1.2": Release(archive_state, None, recipe=False, inverse=True),
    "1.3-1.5": Release(state_bytes, None, recipe=False, inverse=True),
    "1.6-1.7": Release(
        state_bytes, f"{ATTENTION}.fused_attention._extra_state", recipe=False, inverse=True
    ),
    "1.8-1.13": Release(state_bytes, f"{ATTENTION}._extra_state", recipe=True, inverse=True),
    "2.0-2.20": Release(state_bytes, f"{ATTENTION}._extra_state", recipe=True, inverse=False),
}


def save_states(release: Release, layer: torch.nn.Module) -> dict[str, Any]:
    """Return the layer's parameters with a release's extra states of a training under delayed scaling."""
    state = {
        name: value
        for name, value in layer.state_dict().items()
        if not name.endswith("_extra_state")
    }
    for name, (forward, backward) in SLOTS.items():
        content = module_state(
            forward, backward, with_recipe=release.recipe, with_inverse=release.inverse
        )
        state[f"{name}._extra_state"] = release.container(content)
    if release.attention is not None:
        state[release.attention] = empty()
    return state


def save_high_precision_states(release: Release, layer: torch.nn.Module) -> dict[str, Any]:
    """Return the layer's parameters with a release's extra states of a training without FP8."""
    return {
        name: value if not name.endswith("_extra_state") else empty()
        for name, value in save_states(release, layer).items()
    }


def stateless(recipe: Recipe) -> Tensor:
    """Return the extra state of 2.0 to 2.17 under a recipe without state; later releases write none."""
    vars(recipe).pop("_description", None)
    return state_bytes(
        {"recipe": recipe, "extra_fp8_variables": {"fp8_checkpoint": True, "num_gemms": 1}}
    )
