"""autocast: the modules called inside a block compute in the low precision of a recipe.

The block pushes one immutable record, `current()`, that a module reads once at the start of its forward pass.
A block belongs to the thread that entered it, and to the tasks and threads that run in a copy of its context.
"""

from __future__ import annotations

import threading
from contextlib import ContextDecorator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

from ...common.checks import refuse_keywords
from ...common.numbers import to_bool
from ...common.recipe import Recipe
from ..constants import dist_group_type
from ..runtime.checks import group_or_none
from ..runtime.tracing import warn_deprecated
from . import delayed_scaling
from .support import check_block, check_recipe_support, default_recipe


class AutocastState(NamedTuple):
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


_Entered = tuple[AutocastState, int]

# The innermost record and the number of enabled blocks, as the context that is running has them.
_entered: ContextVar[_Entered] = ContextVar("transformer_engine_autocast", default=(OUTSIDE, 0))


class _Holder:
    """What a thread is in: the innermost record, open enabled blocks, the first module, a recomputed function.

    A tracing compiler cannot read a context variable, so it reads and writes this. Eager calls bring it in line with
    the context first (`_here`), which changes when a thread goes from one task to another.

    recomputes    a function is being run that will be, or has been, run a second time
    recomputing   this is the second run
    """

    def __init__(self, entered: _Entered) -> None:
        self.entered = entered
        self.state, self.enabled_blocks = entered
        self.first_module = False
        self.recomputes = False
        self.recomputing = False

    def enter(self, state: AutocastState, traced: bool) -> AutocastState:
        outer = self.state
        if state.enabled:
            if self.enabled_blocks == 0:
                self.first_module = True
            self.enabled_blocks += 1
        self.state = state
        if not traced:
            self.tell_context()
        return outer

    def leave(self, state: AutocastState, outer: AutocastState, traced: bool) -> bool:
        """Back to outer; was state the outermost enabled block?"""
        self.state = outer
        if state.enabled:
            self.enabled_blocks -= 1
        if not traced:
            self.tell_context()
        return state.enabled and self.enabled_blocks == 0

    def tell_context(self) -> None:
        """Let tasks that copy this context from here on start with what it is in; a compiler cannot write there."""
        self.entered = entered = (self.state, self.enabled_blocks)
        _entered.set(entered)

    def take_first(self) -> bool:
        first = self.first_module
        self.first_module = False
        return first


class _Thread(threading.local):
    """One holder a thread; a thread that is started in a copied context begins with what that context is in."""

    def __init__(self) -> None:
        self.holder = _Holder(_entered.get())


_thread = _Thread()
_is_compiling = torch.compiler.is_compiling


def here() -> _Holder:
    """This thread's holder, in line with the context that is running."""
    return _thread.holder if _is_compiling() else here_in_eager_mode()


def here_in_eager_mode() -> _Holder:
    """here(), for a caller that has asked whether a compiler is tracing."""
    holder = _thread.holder
    entered = _entered.get()
    if holder.entered is not entered:
        holder.entered = entered
        holder.state, holder.enabled_blocks = entered
        holder.first_module = False
    return holder


def current() -> AutocastState:
    """The record of the innermost autocast block; outside of all blocks one that is not enabled."""
    return here().state


def enabled_blocks() -> int:
    """How many enabled blocks are open round the caller."""
    return here().enabled_blocks


def is_first_module() -> bool:
    """True once in an outermost enabled block. Nothing here asks; it is for callers of the original's manager."""
    return here().take_first()


def snapshot() -> tuple[AutocastState, bool]:
    """What `reinstate` needs to bring this moment back, for recomputation."""
    holder = here()
    return holder.state, holder.first_module


def reinstate(moment: tuple[AutocastState, bool]) -> None:
    """Bring back a snapshot in this thread, without opening or closing a block."""
    holder = here()
    holder.state, holder.first_module = moment


def reset() -> None:
    """Forget all blocks of this thread, also open ones."""
    holder = here()
    holder.state, holder.enabled_blocks = OUTSIDE, 0
    holder.first_module = False
    if not _is_compiling():
        holder.tell_context()


class autocast(ContextDecorator):
    """with autocast(recipe=...): output = module(input)   # quantized by the recipe

    calibrating          with enabled=False: compute in high precision, but record amaxes
    recipe               None: `get_default_recipe()`
    amax_reduction_group ranks over which delayed scaling takes the maximum of amaxes

    Blocks nest; a disabled one inside an enabled one computes in high precision. Leaving a thread's outermost
    enabled block updates the forward scales of delayed scaling, unless gradients are off, the block raised, or this
    is the second run of a checkpointed function.
    """

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: dist_group_type | None = None,
        _graph: bool = False,
        **others: Any,
    ):
        if others:
            refuse_keywords("autocast", others, {"fp8_recipe": "recipe", "fp8_group": "amax_reduction_group"})
        enabled = check_block(enabled, recipe)
        if type(calibrating) is not bool:
            calibrating = to_bool("calibrating", calibrating)
        if amax_reduction_group is not None:
            group_or_none("amax_reduction_group", amax_reduction_group)
        if recipe is None and (enabled or calibrating):
            recipe = default_recipe()
        self._state = AutocastState(enabled, calibrating, recipe, amax_reduction_group, _graph)
        self._outer: AutocastState | None = None

    @property
    def is_open(self) -> bool:
        """Has the block been entered and not been left?"""
        return self._outer is not None

    @property
    def state(self) -> AutocastState:
        """The settings that the block was made with."""
        return self._state

    def opened_with(self, enabled: bool, graph: bool) -> bool:
        """Are these the settings that the block was made with?"""
        return bool(self._state.enabled) == bool(enabled) and bool(self._state.graph) == bool(graph)

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
        traced = _is_compiling()
        holder = _thread.holder if traced else here_in_eager_mode()
        self._outer = holder.enter(state, traced)

    def __exit__(self, exception_type: object, exception: object, traceback: object) -> None:
        outer = self._outer
        assert outer is not None, "left without having been entered"
        self._outer = None
        traced = _is_compiling()
        holder = _thread.holder if traced else here_in_eager_mode()
        outermost = holder.leave(self._state, outer, traced)
        if not outermost or exception_type is not None or self._state.graph or holder.recomputing:
            return
        # The first run of a reentrant checkpoint has gradients off although its second run will train.
        if torch.is_grad_enabled() or holder.recomputes:
            delayed_scaling.update_all(forward=True)


def fp8_autocast(
    enabled: bool = True, calibrating: bool = False, fp8_recipe: Recipe | None = None,
    fp8_group: dist_group_type | None = None, _graph: bool = False, **others: Any,
) -> autocast:  # fmt: skip
    """autocast by its earlier name."""
    refuse_keywords("fp8_autocast", others, {"recipe": "fp8_recipe", "amax_reduction_group": "fp8_group"})
    warn_deprecated("fp8_autocast", "autocast(enabled, calibrating, recipe, amax_reduction_group)")
    return autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph)
