"""A module's call in a function that is run twice: repeated bit for bit, or refused where it would not be."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..distributed.recompute import in_fp8_activation_recompute_phase
from ..quantization.autocast import AutocastState
from ..quantization.replay import runs
from .recipe_state import ProductQuantizers

if TYPE_CHECKING:
    from .base import TransformerEngineBaseModule


def repeatable(
    module: TransformerEngineBaseModule, products: tuple[ProductQuantizers, ...]
) -> tuple[ProductQuantizers, ...]:
    """The quantizers of a call in a recomputed function: first runs get their states, second runs repeat them."""
    for run in runs():
        if not run.again:
            run.states.keep(module.tracing_key, [product.replay_states() for product in products])
            continue
        states = run.next(module.tracing_key)
        if states is None:
            raise RuntimeError(
                f"{type(module).__name__} is called in the second run of a checkpointed function, but was not called "
                "under this recipe so often in its first; let the function do the same both times"
            )
        products = tuple([p.replaying(s) for p, s in zip(products, states, strict=True)])
    return products


def refuse_other_repetition(
    module: TransformerEngineBaseModule, before: AutocastState, state: AutocastState
) -> None:
    """RuntimeError if the backward of a checkpoint that is not ours is running the module, which under `before` ran
    without gradients, under another state."""
    if before.enabled == state.enabled and (not state.enabled or before.recipe == state.recipe):
        return
    checkpoint = type(torch._C._current_autograd_node()).__name__
    if "Checkpoint" not in checkpoint or in_fp8_activation_recompute_phase():
        return
    first, second = (type(s.recipe).__name__ if s.enabled else "no autocast" for s in (before, state))
    raise RuntimeError(
        f"{checkpoint} runs {type(module).__name__} again under {second}, its first run was under {first}: the "
        "gradients would be of another function; use transformer_engine.pytorch.checkpoint, which repeats the "
        "autocast, or enter autocast inside of the function"
    )
