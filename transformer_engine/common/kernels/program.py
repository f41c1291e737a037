"""An operation of several kernels as data: launches in order, and the buffers that they share, by name."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from .launch import Launch


class Step(NamedTuple):
    """One launch, and what its inputs and its outputs are called; None: not given, not made."""

    launch: Launch
    inputs: tuple[str | None, ...]
    outputs: tuple[str | None, ...]


@dataclass(frozen=True, eq=False)
class Program:
    """Steps, to be started in order.

    inputs    what the caller gives
    results   what the caller gets; every other buffer is scratch. The launch that makes a buffer says what it is, and
              what it must hold before

    Raises ValueError for a step that reads what no step before it makes.
    """

    inputs: tuple[str, ...]
    steps: tuple[Step, ...]
    results: tuple[str | None, ...]

    def __post_init__(self) -> None:
        known: set[str | None] = {None, *self.inputs}
        for launch, inputs, outputs in self.steps:
            name = launch.kernel.fn.__name__
            if unknown := [read for read in inputs if read not in known]:
                raise ValueError(f"{name} reads {unknown[0]!r}, which is neither given nor made before it")
            for called, output in zip(outputs, launch.outputs, strict=True):
                if (called is None) != (output is None):
                    raise ValueError(f"{name} makes {output}, and it is called {called!r}")
            known.update(outputs)
        if missing := [result for result in self.results if result not in known]:
            raise ValueError(f"no step makes the result {missing[0]!r}")

    @cached_property
    def places(self) -> tuple[tuple[tuple[Launch, tuple[int, ...]], ...], tuple[int, ...]]:
        """(launch and places of its inputs, of every step; places of the results).

        Places count None, then the inputs, then the outputs of the steps in order.
        """
        numbers: dict[str | None, int] = {None: 0}
        numbers.update((name, place) for place, name in enumerate(self.inputs, 1))
        made = len(self.inputs) + 1
        steps = []
        for launch, inputs, outputs in self.steps:
            steps.append((launch, tuple(numbers[name] for name in inputs)))
            for place, name in enumerate(outputs, made):
                if name is not None:
                    numbers[name] = place
            made += len(outputs)
        return tuple(steps), tuple(numbers[name] for name in self.results)
