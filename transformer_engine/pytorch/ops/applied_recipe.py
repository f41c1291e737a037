"""Recipe for a chain's operations in one call, and its scale updates, in eager mode and while a compiler traces.

State that is created inside a graph would be lost. A tracing compiler therefore executes the
functions that create it. Such functions take strings only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...common.recipe import Recipe, recipe_described_as, recipe_description, recipe_revision
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


class AppliedRecipe(NamedTuple):
    """The recipe that operations use, by which a later call sees whether they still do.

    Attributes:
        recipe, revision, group: The recipe in the autocast state, its revision, and the group.
        applied: `_applied` per operation.
        stateful: An operation has scales that change between calls.
        pools: The states that are updated together; another object after any has been registered.
    """

    recipe: Any
    revision: Any
    group: Any
    applied: list[Any]
    stateful: bool
    pools: Any

    def is_current(self, recipe: Recipe | None, group: Any, ops: Sequence[RecipeSlots]) -> bool:
        """Return whether operations use a recipe and group already."""
        if recipe is not self.recipe or recipe_revision(recipe) is not self.revision:
            return False
        if recipe is not None and group is not self.group:
            return False
        if self.stateful and self.pools is not delayed_scaling.registry.pools:
            return False
        return [op._applied for op in ops] == self.applied


# No recipe has been applied; the recipe of this record is an object that no call has.
NOT_APPLIED = AppliedRecipe(object(), None, None, [], False, None)


@constant_while_tracing
def _apply_recipe_while_tracing(key: str, recipe: str | None, group: Any) -> bool:
    state = (
        AutocastState() if recipe is None else AutocastState(True, False, recipe_described_as(recipe), group)
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
