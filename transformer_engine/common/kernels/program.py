"""An operation with several kernels as data: launches in order, and the named buffers that they share."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from .launch import Launch


class ProgramStep(NamedTuple):
    """One launch, and its input and output names; None: absent.

    Attributes:
        launch: The kernel launch.
        inputs: Names of the tensors that the launch reads.
        outputs: Names of the tensors that the launch writes.
    """

    launch: Launch
    inputs: tuple[str | None, ...]
    outputs: tuple[str | None, ...]


def step(launch: Launch, inputs: tuple[str | None, ...], names: tuple[str, ...]) -> ProgramStep:
    """Build a launch's step; `names` are its present outputs."""
    outputs = zip(names, launch.outputs, strict=True)
    return ProgramStep(
        launch, inputs, tuple(name if output is not None else None for name, output in outputs)
    )


@dataclass(frozen=True, eq=False)
class Program:
    """Steps that are launched in order.

    Attributes:
        inputs: Buffers that the caller passes.
        steps: The launches, with their buffer names.
        results: Buffers that are returned; all others are scratch. The launch that allocates a buffer declares its
            shape, dtype and initial value.
        into: Buffers that the caller allocates, because it knows their shapes, and passes after the inputs.
        kept: Prepared executions, by device; filled by a framework.

    Raises:
        ValueError: A step reads a buffer before it is written, or writes a buffer without a name.
    """

    inputs: tuple[str, ...]
    steps: tuple[ProgramStep, ...]
    results: tuple[str | None, ...]
    into: tuple[str, ...] = ()
    kept: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        available: set[str | None] = {None, *self.inputs}
        for launch, inputs, outputs in self.steps:
            name = launch.kernel.fn.__name__
            if absent := [read for read in inputs if read not in available]:
                raise ValueError(
                    f"{name} reads {absent[0]!r}, which is neither given nor made before it"
                )
            for called, output in zip(outputs, launch.outputs, strict=True):
                if (called is None) != (output is None):
                    raise ValueError(f"{name} makes {output}, and it is called {called!r}")
            available.update(outputs)
        if missing := [result for result in (*self.results, *self.into) if result not in available]:
            raise ValueError(f"no step makes the result {missing[0]!r}")

    @cached_property
    def places(self) -> tuple[tuple[tuple[Launch, tuple[int, ...]], ...], tuple[int, ...]]:
        """Resolve (launch and input indices for every step; result indices).

        Index 0 is None, followed by the inputs, the caller's buffers, and the steps' outputs in order.
        """
        given = (*self.inputs, *self.into)
        numbers: dict[str | None, int] = {None: 0}
        numbers.update((name, index) for index, name in enumerate(given, 1))
        next_number = len(given) + 1
        steps = []
        for launch, inputs, outputs in self.steps:
            steps.append((launch, tuple(numbers[name] for name in inputs)))
            for index, name in enumerate(outputs, next_number):
                if name is not None:
                    numbers[name] = index
            next_number += len(outputs)
        return tuple(steps), tuple(numbers[name] for name in self.results)

    @cached_property
    def caller_allocated(self) -> tuple[tuple[int, ...], ...]:
        """Indices of each step's outputs that the caller allocates, 0 for the others; () for a step without any."""
        numbers = {name: index for index, name in enumerate(self.into, len(self.inputs) + 1)}
        steps = (
            tuple(numbers.get(name or "", 0) for name in outputs) for _, _, outputs in self.steps
        )
        return tuple(places if any(places) else () for places in steps)
