"""Replayed scales for compiled functions that a checkpoint recomputes.

A checkpoint that is not reentrant matches the tensors that both runs save by their order, so both runs must
call the same graph. The graph reads scales through the operator `replay_scale`, which knows the run only
while it executes: in the first run it copies the present scale, and in the second run it returns that copy.
Writes of the second run to scales and histories are undone at its end.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from ..runtime.tracing import hide_from_selective_checkpoints


class _Run:
    """A recomputed function's run: the first copies scales, a second reads the copies and undoes its writes."""

    def __init__(self, copies: dict[str, list[Tensor]], again: bool):
        self.copies = copies
        self.again = again
        self._reads: dict[str, int] = {}
        self._before: list[tuple[Tensor, Tensor]] = []

    def scale(self, scale: Tensor, history: Tensor, state: str) -> Tensor:
        if not self.again:
            self.copies.setdefault(state, []).append(scale.clone())
            return scale
        self._before += [(tensor, tensor.clone()) for tensor in (scale, history)]
        copies = self.copies.get(state, [])
        number = self._reads[state] = self._reads.get(state, -1) + 1
        if len(copies) == 1:
            return copies[0]  # a compiler may merge several reads of an unchanged scale
        if number >= len(copies):
            raise RuntimeError(
                f"a compiled function reads a scale {number + 1} times in the second run of a checkpointed function, "
                f"and {len(copies)} times in its first; let the function do the same both times"
            )
        return copies[number]

    def restore(self) -> None:
        """Undo the writes of a second run, the latest first."""
        for tensor, before in reversed(self._before):
            tensor.copy_(before)


class _Runs(threading.local):
    """The runs of a thread, outermost first.

    Attributes:
        active: Whether there is any; the only attribute that a compiler reads.
    """

    def __init__(self) -> None:
        self.active = False
        self.runs: list[_Run] = []


_thread = _Runs()


def is_recomputed() -> bool:
    """Return whether a recomputed function is running in this thread, in either run."""
    return _thread.active


def is_second_run() -> bool:
    """Return whether any recomputed function in this thread is in its second run."""
    return any([run.again for run in _thread.runs])  # noqa: C419 compilers trace a list


class compiled_run(AbstractContextManager):
    """Context for a recomputed function's run.

    Args:
        copies: Scales of the first run by state, which it fills and second runs read.
        again: Whether this is a second run.
        marked: Whether the function runs twice.
    """

    def __init__(self, copies: dict[str, list[Tensor]], again: bool, marked: bool):
        self._run = _Run(copies, again)
        self._marked = marked
        self._before = False

    def __enter__(self) -> None:
        self._before, _thread.active = _thread.active, self._marked
        _thread.runs.append(self._run)

    def __exit__(self, *exception: object) -> None:
        _thread.runs.pop()
        _thread.active = self._before
        with torch.no_grad(), hide_from_selective_checkpoints():
            self._run.restore()


# The operator's result depends on the run; a CUDA graph would repeat the first result.
@torch.library.custom_op(
    "transformer_engine::repeated_scale", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)
def replay_scale(scale: torch.Tensor, history: torch.Tensor, state: str) -> torch.Tensor:
    """Copy a scale, float32 [n]: the present scale in the first run, and again the first run's scale in second runs.

    Args:
        scale: Scales of a state, float32 [n].
        history: Its maxima, float32 [length, n], which the second run must not change.
        state: State key.
    """
    for run in _thread.runs:
        scale = run.scale(scale, history, state)
    return scale.clone()


@replay_scale.register_fake
def _replay_scale_fake(scale, history, state):
    return torch.empty_like(scale)
