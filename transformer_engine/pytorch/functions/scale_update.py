"""The end of a backward pass under delayed scaling: gradient scales for the next step, from the amaxes just seen.

No module has a part in this that others have not: the first quantized backward of a pass, whichever it is, has the
autograd engine call back when the pass is over, and that call updates the states of all modules at once. Those whose
backward did not run have an amax of zero and stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..quantization.delayed_scaling import update_all, update_states

_OUTSIDE = -1  # what torch calls the pass where there is none
_KEPT = 256

# The running passes (torch numbers them through and uses no number twice) that will end with an update. One that
# raises never ends; its number is of no use to anybody and goes when there are too many.
_passes: dict[int, object] = {}


@dataclass(frozen=True)
class ScaleUpdate:
    """What a module's backward updates.

    states     its own backward states, in a compiled graph: when it is traced, other modules need not have any.
               Without any, those of all modules at the end of the pass. Both give the same scales
    group      ranks over which its own amaxes are reduced first
    enclosing  the pass in which the forward ran, to recompute: its backward is a part of that pass
    """

    states: tuple[Any, ...] = ()
    group: Any = None
    enclosing: int = _OUTSIDE

    def run(self) -> None:
        for state in self.states:
            update_states((state,), False, state.recipe, self.group)
        if not self.states and self.enclosing not in _passes:
            _end_with_update(torch._C._current_graph_task_id())


# That of a module that is called in eager mode outside of backward passes.
OF_THE_PASS = ScaleUpdate()


def of_the_pass() -> ScaleUpdate:
    """The update of a module that is called in eager mode."""
    enclosing = torch._C._current_graph_task_id()
    if enclosing == _OUTSIDE:
        return OF_THE_PASS
    _end_with_update(enclosing)
    return ScaleUpdate(enclosing=enclosing)


def in_a_backward() -> bool:
    """Is this thread running a backward pass?"""
    return torch._C._current_graph_task_id() != _OUTSIDE


class _Left:
    """How many blocks of `left_to_caller` are open; torch's threads, which may run the backward, see them too."""

    blocks = 0


@contextmanager
def left_to_caller() -> Iterator[None]:
    """Backward passes inside of the block update no scales: whoever replays them says `of_the_pass().run()`."""
    _Left.blocks += 1
    try:
        yield
    finally:
        _Left.blocks -= 1


def _end_with_update(number: int) -> None:
    """Update all gradient scales when the pass is over; at once where a backward is called by hand, outside of one."""
    if _Left.blocks:
        return
    if number == _OUTSIDE:
        update_all(forward=False)
        return
    mine = object()
    if _passes.setdefault(number, mine) is not mine:  # one step, for the threads of a pass share it
        return
    if len(_passes) > _KEPT:
        _passes.pop(next(iter(_passes)), None)
    torch.autograd.Variable._execution_engine.queue_callback(partial(_end, number))


def _end(number: int) -> None:
    _passes.pop(number, None)
    update_all(forward=False)
