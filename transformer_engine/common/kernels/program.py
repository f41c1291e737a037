"""An operation of several kernels as data: launches in order, and the buffers that they share, by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from .launch import Launch


class ProgramStep(NamedTuple):
    """One launch, and what its inputs and its outputs are called; None: not given, not made."""

    launch: Launch
    inputs: tuple[str | None, ...]
    outputs: tuple[str | None, ...]


def step(launch: Launch, inputs: tuple[str | None, ...], names: tuple[str, ...]) -> ProgramStep:
    """A launch, and the names of those of its outputs that it makes."""
    outputs = zip(names, launch.outputs, strict=True)
    return ProgramStep(
        launch, inputs, tuple(name if output is not None else None for name, output in outputs)
    )


@dataclass(frozen=True, eq=False)
class Program:
    """Steps, to be started in order.

    inputs    what the caller gives
    results   what the caller gets; every other buffer is scratch. The launch that makes a buffer says what it is, and
              what it must hold before
    into      buffers that the caller makes, because it knows their extents, and gives behind the inputs
    kept      what a framework keeps to perform it, by device

    Raises ValueError for a step that reads what no step before it makes, or that makes what it does not name.
    """

    inputs: tuple[str, ...]
    steps: tuple[ProgramStep, ...]
    results: tuple[str | None, ...]
    into: tuple[str, ...] = ()
    kept: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        there: set[str | None] = {None, *self.inputs}
        for launch, inputs, outputs in self.steps:
            name = launch.kernel.fn.__name__
            if absent := [read for read in inputs if read not in there]:
                raise ValueError(f"{name} reads {absent[0]!r}, which is neither given nor made before it")
            for called, output in zip(outputs, launch.outputs, strict=True):
                if (called is None) != (output is None):
                    raise ValueError(f"{name} makes {output}, and it is called {called!r}")
            there.update(outputs)
        if missing := [result for result in (*self.results, *self.into) if result not in there]:
            raise ValueError(f"no step makes the result {missing[0]!r}")

    @cached_property
    def places(self) -> tuple[tuple[tuple[Launch, tuple[int, ...]], ...], tuple[int, ...]]:
        """(launch and places of its inputs, of every step; places of the results).

        Places count None, then the inputs and what the caller makes, then the outputs of the steps in order.
        """
        given = (*self.inputs, *self.into)
        numbers: dict[str | None, int] = {None: 0}
        numbers.update((name, place) for place, name in enumerate(given, 1))
        made = len(given) + 1
        steps = []
        for launch, inputs, outputs in self.steps:
            steps.append((launch, tuple(numbers[name] for name in inputs)))
            for place, name in enumerate(outputs, made):
                if name is not None:
                    numbers[name] = place
            made += len(outputs)
        return tuple(steps), tuple(numbers[name] for name in self.results)

    @cached_property
    def caller_made(self) -> tuple[tuple[int, ...], ...]:
        """Of every step the places of its outputs that the caller makes, 0 for the others; () where there is none."""
        numbers = {name: place for place, name in enumerate(self.into, len(self.inputs) + 1)}
        steps = (tuple(numbers.get(name or "", 0) for name in outputs) for _, _, outputs in self.steps)
        return tuple(places if any(places) else () for places in steps)
