"""Run a pass step by step: each operation is looked up in a table, each buffer freed after its last reader.

This executor runs everywhere: on a CPU, under a tracing compiler, for tensor subclasses, while backends are forced or
observed, and in dry runs. `compiled.py` is the executor of warm passes on a GPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...common.memory import Memory
from ...common.passes.schedule import buffers, freed_after
from ...common.passes.step import Pass
from ..offload.marks import active as offloading
from .saving import arrives
from .steps import OPERATIONS, Environment


class _Slots(NamedTuple):
    """One step over a list of buffers: places of inputs and results, and the places that are freed after it.

    `arriving` are the saved operands that the step is the first to read; `made` pairs places of the results with
    positions in what the operation returns.
    """

    op: str
    settings: Any
    inputs: tuple[int, ...]
    made: tuple[tuple[int, int], ...]
    freed: tuple[int, ...]
    arriving: tuple[int, ...]


class Schedule(NamedTuple):
    """A pass over a list of buffers. The last buffer of the list is None, for absent inputs and results.

    Attributes:
        size: Number of buffers.
        given: Number of inputs.
        unread: Places of inputs that no step reads and that are not kept.
        steps: The steps.
        results: Places of the results.
        saved: Places of the saved buffers.
    """

    size: int
    given: int
    unread: tuple[int, ...]
    steps: tuple[_Slots, ...]
    results: tuple[int, ...]
    saved: tuple[int, ...]


def _scheduled(pass_: Pass) -> Schedule:
    lifetimes = buffers(pass_)
    places: dict[str | None, int] = {name: place for place, name in enumerate(lifetimes)}
    places[None] = size = len(places)
    freed = freed_after(pass_)
    steps = [
        _Slots(
            step.op,
            step.settings,
            tuple([places[name] for name in step.inputs]),
            tuple([(places[name], i) for i, name in enumerate(step.results) if name is not None]),
            tuple([places[name] for name in freed[number]]),
            tuple(
                [
                    places[name]
                    for name in step.reads()
                    if name in pass_.inputs and lifetimes[name].first_read == number
                ]
            ),
        )
        for number, step in enumerate(pass_.steps)
    ]
    unread = [
        places[b.name] for b in lifetimes.values() if b.made_by is None and b.last_read is None and not b.kept
    ]
    return Schedule(
        size,
        len(pass_.inputs),
        tuple(unread),
        tuple(steps),
        tuple([places[name] for name in pass_.results]),
        tuple([places[name] for name in pass_.saved]),
    )


_schedules: Memory[Pass, Schedule] = Memory(_scheduled, 4096)


def schedule_of(pass_: Pass) -> Schedule:
    """Return the schedule of a pass, made at the first call; a tracing compiler writes to no cache."""
    return _scheduled(pass_) if torch.compiler.is_compiling() else _schedules[pass_]


def run(schedule: Schedule, env: Environment, given: list[Any]) -> tuple[list[Any], list[Any]]:
    """Run a pass.

    Args:
        schedule: The pass, see `schedule_of`.
        env: What the settings of the steps refer to.
        given: The inputs in order. The list is emptied, so that each input is freed after its last reader.

    Returns:
        The results and the saved buffers, None for those that the pass does not make.
    """
    values: list[Any] = [*given, *[None] * (schedule.size + 1 - len(given))]
    given.clear()
    for place in schedule.unread:
        values[place] = None
    for op, settings, inputs, made, freed, arriving in schedule.steps:
        if offloading.used:
            for place in arriving:
                arrives(values[place])
        results = OPERATIONS[op](env, settings, *[values[place] for place in inputs])
        for place in freed:
            values[place] = None
        for place, position in made:
            if place not in freed:
                values[place] = results[position]
        del results
    return [values[place] for place in schedule.results], [values[place] for place in schedule.saved]
