"""torch.utils.checkpoint repeats autocast, recipe and scales of the first run, as te.checkpoint does.

torch restores its random states and torch.autocast for the second run, and has no hook for other state, such as a
`CudaRNGStatesTracker`. Its functions cannot be replaced, because callers (Hugging Face, FSDP's wrapper, Lightning)
have imported them before. This module therefore extends the classes that both implementations instantiate in every
call. The graph node or the frame of the call owns the state. Nested checkpoints nest their runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointFunction, _checkpoint_hook

from ..quantization.recompute_states import SecondRun, running
from .rng import TrackedStates


class _SecondRunOfTorch(SecondRun):
    """Context for second runs, which also restores the random states of trackers."""

    def __init__(self) -> None:
        super().__init__()
        self._tracked = TrackedStates()

    @contextmanager
    def context(self) -> Iterator[None]:
        with super().context(), self._tracked.replay():
            yield


class _RepeatedFunction:
    """Wrapper around a checkpointed function: the first call is the first run, every later call a second run."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self._second_run = _SecondRunOfTorch()
        self._called = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        called, self._called = self._called, True
        with self._second_run if called else running(self._second_run.states, False):
            return self.function(*args, **kwargs)


class _SecondRunFunction:
    """Wrapper around a checkpointed function that is called in second runs only."""

    def __init__(self, function: Callable[..., Any], second_run: SecondRun):
        self.function = function
        self._second_run = second_run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._second_run:
            return self.function(*args, **kwargs)


def _apply(cls: type[CheckpointFunction], run_function: Callable[..., Any], *args: Any) -> Any:
    """Apply the autograd function of reentrant checkpoints; without gradients, the function runs once."""
    if torch.is_grad_enabled():
        run_function = _RepeatedFunction(run_function)
    return super(CheckpointFunction, cls).apply(run_function, *args)


def _init(self: Any, frame: Any) -> None:
    """Create the saved-tensor hooks for a first run that is not reentrant; `frame` holds the function to repeat."""
    _torch_init(self, frame)
    second_run = _SecondRunOfTorch()
    frame.recompute_fn = _SecondRunFunction(frame.recompute_fn, second_run)
    self.first_run = running(second_run.states, False)


def _enter(self: Any) -> None:
    self.first_run.__enter__()
    saved_tensors_hooks.__enter__(self)


def _exit(self: Any, *exception: object) -> None:
    saved_tensors_hooks.__exit__(self, *exception)
    self.first_run.__exit__(*exception)


_torch_init = getattr(_checkpoint_hook, "unextended_init", _checkpoint_hook.__init__)


def extend_torch_checkpoint() -> None:
    """Extend both torch.utils.checkpoint implementations in this process.

    Importing this package again replaces the extension of the first import.
    """
    hook: Any = _checkpoint_hook
    hook.unextended_init = _torch_init
    hook.__init__, hook.__enter__, hook.__exit__ = _init, _enter, _exit
    CheckpointFunction.apply = classmethod(_apply)  # pyright: ignore[reportAttributeAccessIssue]
