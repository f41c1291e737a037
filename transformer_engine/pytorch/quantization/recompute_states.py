"""Quantizer states in the first run of a recomputed function, which its second run reads.

A `ReplayStates` belongs to the graph node that will run the function again: the first run fills it, every second run
reads it from its beginning, and it is freed with the node. Modules hold no states. A forward pass that is dropped or
raises therefore leaves no state behind, and several forward passes with a pending backward pass stay separate.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from ..runtime.tracing import hide_from_selective_checkpoints
from ..tensor.quantizer import Quantizer
from .autocast import here, reinstate, snapshot
from .compiled_runs import compiled_run

# `Quantizer.replay_state` results, for every product in a module call and every product quantizer,
# or the tensors of each scaling state in a module with a hand-written forward pass.
CallStates = Sequence[tuple[Any, ...]]


class ReplayStates:
    """The calls of the first run, by module (its tracing key) and in the order in which the module was called."""

    def __init__(self) -> None:
        self._calls: dict[str, list[CallStates]] = {}
        self.compiled: dict[
            str, list[Tensor]
        ] = {}  # scales of compiled functions, see `compiled_runs`

    def keep(self, module: str, states: CallStates) -> None:
        self._calls.setdefault(module, []).append(states)

    def call(self, module: str, number: int) -> CallStates | None:
        """Return the states for a module's call, counted from 0; None if the first run had no such call."""
        calls = self._calls.get(module, ())
        return calls[number] if number < len(calls) else None

    def __len__(self) -> int:
        return sum([len(calls) for calls in self._calls.values()])


class FirstInFirstOut(ReplayStates):
    """States for callers that mark both runs themselves and have no node: each call removes the oldest states."""

    def __init__(self) -> None:
        super().__init__()
        self._queues: dict[str, deque[CallStates]] = {}

    def keep(self, module: str, states: CallStates) -> None:
        self._queues.setdefault(module, deque()).append(states)

    def call(self, module: str, number: int) -> CallStates | None:
        queue = self._queues.get(module)
        if not queue:
            return None
        states = queue.popleft()
        if not queue:
            del self._queues[module]
        return states

    def clear(self) -> None:
        self._queues.clear()

    def __len__(self) -> int:
        return sum([len(queue) for queue in self._queues.values()])


class RecomputedRun:
    """One run of a recomputed function: the states that it writes or reads, and the read count per module."""

    def __init__(self, states: ReplayStates, again: bool):
        self.states = states
        self.again = again
        self._taken: dict[str, int] = {}

    def next(self, module: str) -> CallStates | None:
        number = self._taken.get(module, 0)
        self._taken[module] = number + 1
        return self.states.call(module, number)


class _RunningFunctions(threading.local):
    """The recomputed functions that a thread is running, outermost first."""

    def __init__(self) -> None:
        self.runs: list[RecomputedRun] = []


_thread = _RunningFunctions()
marked_by_hand = FirstInFirstOut()


def runs() -> list[RecomputedRun]:
    """Return the active runs of recomputed functions in this thread, outermost first."""
    return _thread.runs


class running(AbstractContextManager[Any]):
    """Context for a recomputed function's run, in this thread.

    Args:
        states: States that the run writes or reads.
        again: Whether this is a second run.
        marked: Whether the thread's state marks the run; False for a function that will not run a second time.
    """

    def __init__(self, states: ReplayStates, again: bool, marked: bool = True):
        self._states = states
        self._again = again
        self._marked = marked
        self._before = (False, False)
        self._compiled = compiled_run(states.compiled, again, marked)

    def __enter__(self) -> None:
        self._compiled.__enter__()
        holder = here()
        self._before = (holder.recomputes, holder.recomputing)
        # A first run within a second run belongs to the second run: it updates no scales.
        holder.recomputes, holder.recomputing = self._marked, self._again or self._before[1]
        _thread.runs.append(RecomputedRun(self._states, self._again))

    def __exit__(self, *exception: object) -> None:
        _thread.runs.pop()
        holder = here()
        holder.recomputes, holder.recomputing = self._before
        self._compiled.__exit__(*exception)


class RepeatedContext(AbstractContextManager[Any]):
    """Base class for contexts that may be entered repeatedly and within each other."""

    def __init__(self) -> None:
        self._entered: list[AbstractContextManager[Any]] = []

    def context(self) -> AbstractContextManager[Any]:
        """Create the context of one entry."""
        raise NotImplementedError(type(self).__name__)

    def __enter__(self) -> None:
        context = self.context()
        context.__enter__()
        self._entered.append(context)

    def __exit__(self, *exception: Any) -> bool | None:
        return self._entered.pop().__exit__(*exception)


class SecondRun(RepeatedContext):
    """Context for second runs: the autocast state from this object's creation, and the scales of the first run.

    Attributes:
        states: Scales that modules used in the first run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.states = ReplayStates()
        self._autocast = snapshot()

    @contextmanager
    def context(self) -> Iterator[None]:
        before = snapshot()
        reinstate(self._autocast)
        try:
            with running(self.states, True):
                yield
        finally:
            reinstate(before)


def replay_values(
    kind: str, module: str, values: Sequence[tuple[Tensor, ...]]
) -> CallStates | None:
    """Values of the first run for a call in a second run, by state; None in a first run, which records copies.

    Args:
        kind: Class name of the module, for messages.
        module: Module key.
        values: Present values per state.

    Raises:
        RuntimeError: The second run calls the module more often than the first one.
    """
    states: CallStates | None = None
    with hide_from_selective_checkpoints():
        for run in runs():
            if run.again:
                states = run.next(module)
                if states is None:
                    raise RuntimeError(_MORE_OFTEN.format(kind))
            else:
                copies = values if states is None else states
                run.states.keep(
                    module, [tuple([tensor.clone() for tensor in state]) for state in copies]
                )
    return states


_MORE_OFTEN = (
    "{} is called in the second run of a checkpointed function, but was not called under this recipe so often in its "
    "first; let the function do the same both times"
)


def replay_quantizers(
    kind: str, module: str, products: Sequence[Sequence[Quantizer]]
) -> Sequence[Sequence[Quantizer]]:
    """Forward quantizers for a call in a recomputed function, by product: second runs replay first-run states.

    In compiled functions the quantizers read their scales by an operator that replays them; see `compiled_runs`.

    Args:
        kind: Class name of the module, for messages.
        module: Tracing key of the module.
        products: Quantizers of the call, by product.

    Raises:
        RuntimeError: The second run calls the module more often than the first one.
    """
    if torch.compiler.is_compiling():
        return products
    with hide_from_selective_checkpoints():
        for run in runs():
            if not run.again:
                run.states.keep(
                    module, [tuple([q.replay_state() for q in product]) for product in products]
                )
                continue
            states = run.next(module)
            if states is None:
                raise RuntimeError(_MORE_OFTEN.format(kind))
            products = [
                [
                    quantizer.replaying(state)
                    for quantizer, state in zip(product, saved, strict=True)
                ]
                for product, saved in zip(products, states, strict=True)
            ]
    return products
