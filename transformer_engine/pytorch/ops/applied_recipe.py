"""Recipe for a chain's operations in one call, and its scale updates, in eager mode and while a compiler traces.

State that is created inside a graph would be lost. A tracing compiler therefore executes the
functions that create it. Such functions take strings only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...common.recipe import Recipe, recipe_described_as, recipe_description, recipe_revision
from ..distributed.recompute import state_without_gradients
from ..functions.scale_update import ScaleUpdate, is_first_call_in_trace, update_at_end_of_pass
from ..quantization import delayed_scaling
from ..quantization.autocast import AutocastState
from ..runtime.tracing import constant_while_tracing
from .recipe_slots import RecipeSlots, operations_by_name


def apply_recipe(ops: Sequence[RecipeSlots], state: AutocastState) -> None:
    """Make operations use the recipe of an autocast state from now on."""
    traced = torch.compiler.is_compiling()
    recipe = state.recipe if state.enabled or state.calibrating else None
    for op in ops:
        if not traced:
            op.apply_recipe(state)
        elif recipe is not None:
            _apply_recipe_while_tracing(op._traced_name, recipe_description(recipe), state.group)
        elif op._applied is not None:
            _apply_recipe_while_tracing(op._traced_name, None, None)


class AppliedRecipe:
    """The recipe that a chain's operations use from one call to the next.

    Args:
        ops: The chain's operations.

    Attributes:
        stateful: An operation has scales that change between calls.
    """

    def __init__(self, ops: Sequence[RecipeSlots]) -> None:
        self._ops = ops
        self.stateful = False
        # The recipe in the autocast state of the last call, its revision, and the group.
        self._recipe: Recipe | None = None
        self._revision: Any = None
        self._group: Any = None
        # `_applied` per operation; None before the first call.
        self._applied: list[Any] | None = None
        # The states that are updated together; another object after any has been registered.
        self._pools: Any = None
        # Autocast state in the last call without gradients; see `_check_second_run`.
        self._state_without_gradients: AutocastState | None = None

    def update(self, state: AutocastState) -> None:
        """Apply the recipe of an autocast state, unless the operations use it already.

        Raises:
            RuntimeError: A reentrant checkpoint of another library runs the chain a second time, under
                another autocast state than the first time.
        """
        self._check_second_run(state)
        recipe = state.recipe if state.enabled or state.calibrating else None
        if self._is_current(recipe, state.group):
            return
        apply_recipe(self._ops, state)
        self._recipe, self._revision, self._group = recipe, recipe_revision(recipe), state.group
        self._applied = [op._applied for op in self._ops]
        self.stateful = any(op.has_scaling_state() for op in self._ops)
        self._pools = delayed_scaling.registry.pools

    def _check_second_run(self, state: AutocastState) -> None:
        """Raise RuntimeError if a reentrant checkpoint repeats the chain under another autocast state.

        A reentrant checkpoint runs the chain twice: without gradients, then in the backward pass. A call without
        gradients may be the first run, so its state is stored. A later call with another state may be the second
        run; `state_without_gradients` recognizes it and raises the error.
        """
        previous = self._state_without_gradients
        if previous is not state and (previous is not None or not torch.is_grad_enabled()):
            self._state_without_gradients = state_without_gradients("te.ops", previous, state)

    def _is_current(self, recipe: Recipe | None, group: Any) -> bool:
        """Whether the operations use a recipe and group already."""
        if recipe is not self._recipe or recipe_revision(recipe) is not self._revision:
            return False
        if recipe is not None and group is not self._group:
            return False
        if self.stateful and self._pools is not delayed_scaling.registry.pools:
            return False
        return [op._applied for op in self._ops] == self._applied


@constant_while_tracing
def _apply_recipe_while_tracing(key: str, recipe: str | None, group: Any) -> bool:
    state = (
        AutocastState()
        if recipe is None
        else AutocastState(True, False, recipe_described_as(recipe), group)
    )
    operations_by_name[key].apply_recipe(state)
    return True


def scale_update(ops: Sequence[RecipeSlots], state: AutocastState) -> ScaleUpdate | None:
    """Return the scale update after a backward pass under delayed scaling, or None."""
    if not state.enabled:
        return None
    stateful = [op for op in ops if op.has_scaling_state()]
    if not stateful:
        return None
    if not torch.compiler.is_compiling():
        return update_at_end_of_pass()
    states: list[Any] = []
    for op in stateful:
        if _first_call_while_tracing(op._traced_name):
            states += op.delayed_states("backward")
    return ScaleUpdate(tuple(states), state.group) if states else None


@constant_while_tracing
def _first_call_while_tracing(key: str) -> bool:
    """Return whether this is the operation's first call in the graph that is being traced."""
    return is_first_call_in_trace(operations_by_name[key])


def distinct_while_tracing(tensors: Sequence[Any]) -> list[Any]:
    """Return distinct tensors; torch 2.13 cannot trace an autograd function that receives one tensor twice.

    Row counts shared by two grouped layers, and shared parameters, are the same tensors. A graph
    that has read id() of an input is compiled again for each other input.
    """
    if not torch.compiler.is_compiling():
        return list(tensors)
    results: list[Any] = []
    for number, tensor in enumerate(tensors):
        repeated = any(tensor is other for other in tensors[:number])
        results.append(tensor.view_as(tensor) if repeated else tensor)
    return results
