"""Named random states, for dropout and initialization that differ or agree between tensor-parallel ranks.

With CUDA a state is a `torch.Generator` on the current device, which CUDA graphs can register.
Without CUDA it is the state of the CPU generator, a uint8 tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from ...common.checks import described
from ...common.numbers import to_int, with_article
from ..runtime.device import has_cuda

RngState = torch.Generator | Tensor
RngStates = dict[Hashable, RngState]

_tracked: RngStates = {}
_trackers: weakref.WeakSet[CudaRNGStatesTracker] = weakref.WeakSet()


def graph_safe_rng_available() -> bool:
    """Return whether tracked random states can be registered with a CUDA graph."""
    return has_cuda() and hasattr(torch.Generator, "graphsafe_set_state")


def is_graph_safe_rng_state(state: RngState) -> bool:
    """Return whether a CUDA graph can register a random state: a generator, not its state bytes.

    Args:
        state: Random number generator state.
    """
    return isinstance(state, torch.Generator)


def get_all_rng_states() -> RngStates:
    """Return the named states of the trackers, which a graph registers before its capture."""
    return _tracked


def set_all_rng_states(states: RngStates) -> None:
    """Replace the random states from `get_all_rng_states`.

    Args:
        states: {name: state}.
    """
    global _tracked
    _tracked = states


class CudaRNGStatesTracker:
    """Named random states; `fork(name)` runs a block with one state and saves its progress."""

    def __init__(self) -> None:
        _trackers.add(self)
        self.states_: dict[Hashable, RngState] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        """Remove all states and seeds."""
        self.states_ = {}
        self.seeds_ = set()

    def get_states(self) -> RngStates:
        """Return the states, not copied, in a new dict."""
        return dict(self.states_)

    def set_states(self, states: Mapping[Hashable, RngState]) -> None:
        """Continue with states that `get_states` returned."""
        if not isinstance(states, Mapping):
            raise TypeError(
                f"states={described(states)} is not a dict; give the result of get_states()"
            )
        for name, state in states.items():
            if not isinstance(state, (torch.Generator, Tensor)):
                raise TypeError(
                    f"states[{name!r}]={described(state)} is not a random state; give the result of get_states()"
                )
        self.states_ = dict(states)
        set_all_rng_states(self.states_)

    def add(self, name: Hashable, seed: int) -> None:
        """Create a state from a seed.

        Raises:
            ValueError: The name or the seed is in use.
        """
        if not isinstance(name, Hashable):
            raise TypeError(
                f"name={described(name)} is {with_article(type(name))}; give the state's name, a str"
            )
        seed = to_int("seed", seed)
        if seed in self.seeds_:
            raise ValueError(f"seed {seed} is in use already; give each state its own seed")
        if name in self.states_:
            raise ValueError(
                f"random state {name!r} exists already; choose another name or reset() first"
            )
        self.seeds_.add(seed)
        if has_cuda():
            self.states_[name] = _default_cuda_generator().clone_state().manual_seed(seed)
        else:
            self.states_[name] = torch.Generator(device="cpu").manual_seed(seed).get_state()
        set_all_rng_states(self.states_)

    @contextmanager
    def fork(self, name: Hashable = "model-parallel-rng") -> Iterator[None]:
        """Draw from the named state inside the block, and from the default generator after it."""
        if not isinstance(name, Hashable) or name not in self.states_:
            names = ", ".join(map(str, self.states_)) or "none"
            raise ValueError(
                f"there is no random state {name!r} (known: {names}); call add({name!r}, seed) first"
            )
        previous = _current()
        _make_current(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = _current()
            _make_current(previous)


def _default_cuda_generator() -> torch.Generator:
    torch.cuda.init()
    return torch.cuda.default_generators[torch.cuda.current_device()]


def _current() -> RngState:
    """Return the state of the default generator: shared on CUDA, so that later draws advance it; a copy on the CPU."""
    return _default_cuda_generator().graphsafe_get_state() if has_cuda() else torch.get_rng_state()


def _make_current(state: RngState) -> None:
    if isinstance(state, torch.Generator):
        _default_cuda_generator().graphsafe_set_state(state)
    elif has_cuda():
        torch.cuda.set_rng_state(state)
    else:
        torch.set_rng_state(state)


class RngSnapshot:
    """All random states at one moment (CPU, current CUDA device, tracker), to run a block from there again."""

    def __init__(self, get_tracker: Callable[[], CudaRNGStatesTracker] | None = None):
        self.get_tracker = get_tracker
        self.cpu = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state() if has_cuda() else None
        self.tracked = None if get_tracker is None else _copy_states(get_tracker().get_states())

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Run the block from the snapshot's states, then go on from the states before the block."""
        previous = RngSnapshot()
        tracked_before = None if self.get_tracker is None else self.get_tracker().get_states()
        self._restore()
        # Trackers in other libraries take a write, even without states, for a sign that they have been set up.
        if self.get_tracker is not None and self.tracked:
            # Copies again: a generator advances in place, and the block may be replayed more than once.
            self.get_tracker().set_states(_copy_states(self.tracked))
        try:
            yield
        finally:
            previous._restore()
            if (
                self.get_tracker is not None
                and tracked_before is not None
                and (tracked_before or self.tracked)
            ):
                self.get_tracker().set_states(tracked_before)

    def _restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)


class TrackedStates:
    """States of all trackers at one moment, to run a block from there again.

    During CUDA graph capture there are none: torch reads no random state there, and rejects
    generators that the graph has not registered.
    """

    def __init__(self) -> None:
        capturing = has_cuda() and torch.cuda.is_current_stream_capturing()
        self._states = [
            (weakref.ref(tracker), _copy_states(tracker.states_))
            for tracker in _trackers
            if tracker.states_ and not capturing
        ]

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Run the block from the recorded states, then go on from the states before the block."""
        previous = [(tracker, tracker.states_) for tracker in _trackers]
        registered = get_all_rng_states()
        for reference, states in self._states:
            tracker = reference()
            if tracker is not None:
                # Copies again: a generator advances in place, and the block may be replayed more than once.
                tracker.set_states(_copy_states(states))
        try:
            yield
        finally:
            for tracker, states in previous:
                tracker.states_ = states
            set_all_rng_states(registered)


def _copy_states(states: RngStates) -> RngStates:
    return {
        name: state.clone_state() if isinstance(state, torch.Generator) else state.clone()
        for name, state in states.items()
    }
