"""The end of a backward pass under delayed scaling: gradient scales for the next step, from the maxima of this one.

The first quantized backward function in a pass registers a callback with the autograd engine. At
the end of the pass the callback updates the states of all modules together. A module whose backward
function did not run has maximum zero, and its state does not change.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._guards import TracingContext

from ..quantization.delayed_scaling import update_all, update_states

_OUTSIDE = -1  # the pass number that torch returns outside backward passes
_MAX_RUNNING_PASSES = 256

# The running passes that will end with an update. torch gives every pass a new number. A pass that raises an error
# never ends, and its number is evicted when there are too many.
_passes: dict[int, object] = {}


@dataclass(frozen=True)
class ScaleUpdate:
    """The states that the backward function of a module updates.

    Attributes:
        states: Backward states of the module in a compiled graph, which is traced before other modules may
            have any. Empty: the states of all modules, at the end of the pass. Both compute the same scales.
        group: Ranks over which the maxima of `states` are reduced first.
        enclosing: Number of the backward pass that recomputed the forward function; its backward belongs to that pass.
    """

    states: tuple[Any, ...] = ()
    group: Any = None
    enclosing: int = _OUTSIDE

    def run(self) -> None:
        for state in self.states:
            update_states((state,), False, state.recipe, self.group)
        if not self.states and self.enclosing not in _passes:
            _end_with_update(torch._C._current_graph_task_id())


# The update for a module that is called in eager mode outside backward passes.
END_OF_PASS = ScaleUpdate()


def update_at_end_of_pass() -> ScaleUpdate:
    """Return the update for a module that is called in eager mode."""
    enclosing = torch._C._current_graph_task_id()
    if enclosing == _OUTSIDE:
        return END_OF_PASS
    _end_with_update(enclosing)
    return ScaleUpdate(enclosing=enclosing)


def is_backward_pass() -> bool:
    """Return whether this thread executes a backward pass."""
    return torch._C._current_graph_task_id() != _OUTSIDE


# The trace in which each module, or operation of `te.ops`, was last called with a backward pass.
_traced: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def is_first_call_in_trace(owner: Any) -> bool:
    """Return whether this is an owner's first call in the traced graph, or no graph is traced.

    The backward pass of the first call runs last, and therefore updates the scales.
    """
    trace, before = TracingContext.try_get(), _traced.get(owner)
    if trace is None or (before is not None and before() is trace):
        return trace is None
    _traced[owner] = weakref.ref(trace)
    return True


class _Suppressed:
    """Open `skip_scale_updates` block count, shared with the threads in which torch runs backward passes."""

    blocks = 0


@contextmanager
def skip_scale_updates() -> Iterator[None]:
    """Keep backward passes in the block from updating scales; a replay calls `update_at_end_of_pass().run()`."""
    _Suppressed.blocks += 1
    try:
        yield
    finally:
        _Suppressed.blocks -= 1


def _end_with_update(number: int) -> None:
    """Update all gradient scales at the end of the pass, or at once for a backward function that is called directly."""
    if _Suppressed.blocks:
        return
    if number == _OUTSIDE:
        update_all(forward=False)
        return
    mine = object()
    # atomic, because threads in a pass share the dictionary
    if _passes.setdefault(number, mine) is not mine:
        return
    if len(_passes) > _MAX_RUNNING_PASSES:
        _passes.pop(next(iter(_passes)), None)
    torch.autograd.Variable._execution_engine.queue_callback(partial(_end, number))


def _end(number: int) -> None:
    _passes.pop(number, None)
    update_all(forward=False)
