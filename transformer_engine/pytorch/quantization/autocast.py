"""autocast: the modules called inside a block compute in the low precision of a recipe.

The block pushes one immutable record, `current()`, that a module reads once at the start of its forward pass.
"""

from __future__ import annotations

import warnings
from contextlib import ContextDecorator
from dataclasses import dataclass

import torch

from ...common.checks import switch
from ...common.recipe import Recipe
from ..checks import group_or_none
from ..constants import dist_group_type
from . import delayed_scaling
from .support import check_block, check_recipe_support, default_recipe


@dataclass(frozen=True)
class AutocastState:
    """What a module has to know about the innermost autocast block.

    enabled     quantize by recipe
    calibrating record amaxes although nothing is quantized
    graph       the block is being captured in a CUDA graph, which updates scales itself
    """

    enabled: bool = False
    calibrating: bool = False
    recipe: Recipe | None = None
    group: dist_group_type | None = None
    graph: bool = False


OUTSIDE = AutocastState()


class _Holder:
    """The innermost record, how many enabled blocks are open, and whether a module was met in them."""

    def __init__(self) -> None:
        self.state = OUTSIDE
        self.enabled_blocks = 0
        self.first_module = False

    def enter(self, state: AutocastState) -> AutocastState:
        outer = self.state
        if state.enabled:
            if self.enabled_blocks == 0:
                self.first_module = True
            self.enabled_blocks += 1
        self.state = state
        return outer

    def leave(self, state: AutocastState, outer: AutocastState) -> bool:
        """Back to outer; was state the outermost enabled block?"""
        self.state = outer
        if not state.enabled:
            return False
        self.enabled_blocks -= 1
        return self.enabled_blocks == 0

    def take_first(self) -> bool:
        first = self.first_module
        self.first_module = False
        return first


_holder = _Holder()


def current() -> AutocastState:
    """The record of the innermost autocast block; outside of all blocks one that is not enabled."""
    return _holder.state


def is_first_module() -> bool:
    """True once in an outermost enabled block: its backward comes last and updates the backward scales."""
    return _holder.take_first()


def snapshot() -> tuple[AutocastState, bool]:
    """What `reinstate` needs to bring this moment back, for recomputation."""
    return _holder.state, _holder.first_module


def reinstate(moment: tuple[AutocastState, bool]) -> None:
    """Bring back a snapshot, without opening or closing a block."""
    _holder.state, _holder.first_module = moment


def reset() -> None:
    """Forget all blocks, also open ones."""
    _holder.state = OUTSIDE
    _holder.enabled_blocks = 0
    _holder.first_module = False


class autocast(ContextDecorator):
    """with autocast(recipe=...): output = module(input)   # quantized by the recipe

    calibrating          with enabled=False: compute in high precision, but record amaxes
    recipe               None: `get_default_recipe()`
    amax_reduction_group ranks over which delayed scaling takes the maximum of amaxes

    Blocks nest; a disabled one inside an enabled one computes in high precision. Leaving the outermost
    enabled block updates the forward scales of delayed scaling, unless gradients are off or the block raised.
    """

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: dist_group_type | None = None,
        _graph: bool = False,
    ):
        check_block(enabled, recipe)
        switch("calibrating", calibrating)
        group_or_none("amax_reduction_group", amax_reduction_group)
        if recipe is None and (enabled or calibrating):
            recipe = default_recipe()
        self._state = AutocastState(enabled, calibrating, recipe, amax_reduction_group, _graph)
        self._outer: AutocastState | None = None

    def _recreate_cm(self) -> autocast:
        """As a decorator every call gets a block of its own, so that recursion works."""
        state = self._state
        return autocast(state.enabled, state.calibrating, state.recipe, state.group, state.graph)

    def __enter__(self) -> None:
        if self._outer is not None:
            raise RuntimeError("this autocast object is active already; create one for every with statement")
        state = self._state
        if state.enabled and state.recipe is not None:
            supported, reason = check_recipe_support(state.recipe)
            if not supported:
                raise RuntimeError(f"{type(state.recipe).__name__} cannot run here: {reason}")
        self._outer = _holder.enter(state)

    def __exit__(self, exception_type: object, exception: object, traceback: object) -> None:
        outer = self._outer
        assert outer is not None, "left without having been entered"
        self._outer = None
        outermost = _holder.leave(self._state, outer)
        if outermost and exception_type is None and not self._state.graph and torch.is_grad_enabled():
            delayed_scaling.update_all(forward=True)


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: dist_group_type | None = None,
    _graph: bool = False,
) -> autocast:
    """autocast by its earlier name."""
    if not torch.compiler.is_compiling():
        warnings.warn(
            "fp8_autocast is deprecated; use autocast(enabled, calibrating, recipe, amax_reduction_group)",
            DeprecationWarning,
            stacklevel=2,
        )
    return autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph)
