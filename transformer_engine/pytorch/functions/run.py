"""Run a pass step by step: each operation is looked up in a table, each buffer freed after its last reader.

This executor runs everywhere: on a CPU, under a tracing compiler, for tensor subclasses, while backends are forced or
observed, and in dry runs. `fast/compiled.py` is the executor of warm passes on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from ...common.memory import Memory
from ...common.passes.groups import GROUPED
from ...common.passes.schedule import buffers, freed_after
from ...common.passes.step import Pass
from ...common.passes.vocabulary import CastSettings
from ..offload.marks import active as offloading
from ..offload.marks import keep_weight, mark_ready
from ..runtime.autograd import without_autocast
from .linear_spec import Environment
from .saving import wait_for_saved
from .steps import OPERATIONS


class _Slots(NamedTuple):
    """One step over a list of buffers.

    Attributes:
        inputs: Places of the inputs.
        made: Pairs of a result's place and its position in the tuple that the operation returns.
        freed: Places that are freed after the step.
        arriving: Inputs of the pass that this step is the first to read.
        saved: Places of results that the pass saves.
    """

    op: str
    settings: Any
    inputs: tuple[int, ...]
    made: tuple[tuple[int, int], ...]
    freed: tuple[int, ...]
    arriving: tuple[int, ...]
    saved: tuple[int, ...]


class _Getters(NamedTuple):
    """The steps, results and saved buffers of a schedule by `operator.itemgetter`, which reads places in one C call.

    Attributes:
        steps: Of each step, the operation, the settings, the getter of its inputs, `_Slots.made` without results that
            no step reads, and `_Slots.freed`.
        results: Getter of the results.
        saved: Getter of the saved buffers.
        empty: None for every place behind the inputs.
    """

    steps: tuple[tuple[str, Any, Callable[..., Any], tuple[tuple[int, int], ...], tuple[int, ...]], ...]
    results: Callable[..., Any]
    saved: Callable[..., Any]
    empty: tuple[None, ...]


class Schedule(NamedTuple):
    """A pass over a list of buffers. The last buffer of the list is None, for absent inputs and results.

    Attributes:
        pass_: The pass.
        size: Number of buffers.
        given: Number of inputs.
        unread: Places of inputs that no step reads and that are not kept.
        steps: The steps.
        results: Places of the results.
        saved: Places of the saved buffers.
        saved_weights: Of these, the places of weights, which offloading leaves on the device.
        getters: The same, for runs without offloading and watchers.
    """

    pass_: Pass
    size: int
    given: int
    unread: tuple[int, ...]
    steps: tuple[_Slots, ...]
    results: tuple[int, ...]
    saved: tuple[int, ...]
    saved_weights: tuple[int, ...]
    getters: _Getters


def _getter(places: Sequence[int]) -> Callable[..., Any]:
    """Return the function from a list of buffers to those at some places, as a sequence."""
    if len(places) > 1:
        return itemgetter(*places)
    return itemgetter(slice(places[0], places[0] + 1) if places else slice(0))


def _scheduled(pass_: Pass) -> Schedule:
    lifetimes = buffers(pass_)
    places: dict[str | None, int] = {name: place for place, name in enumerate(lifetimes)}
    places[None] = size = len(places)
    freed = freed_after(pass_)
    saved = {name for name in pass_.saved if name is not None}
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
                    if (lifetimes[name].made_by, lifetimes[name].first_read) == (None, number)
                ]
            ),
            tuple([places[name] for name in step.makes() if name in saved]),
        )
        for number, step in enumerate(pass_.steps)
    ]
    unread = [
        places[b.name] for b in lifetimes.values() if b.made_by is None and b.last_read is None and not b.kept
    ]
    results = tuple([places[name] for name in pass_.results])
    kept = tuple([places[name] for name in pass_.saved])
    fast = [
        (
            step.op,
            step.settings,
            _getter(step.inputs),
            tuple([(place, i) for place, i in step.made if place not in step.freed]),
            step.freed,
        )
        for step in steps
    ]
    return Schedule(
        pass_,
        size,
        len(pass_.inputs),
        tuple(unread),
        tuple(steps),
        results,
        kept,
        tuple([places[name] for name in saved if _is_weight(pass_, name)]),
        _Getters(tuple(fast), _getter(results), _getter(kept), (None,) * (size + 1 - len(pass_.inputs))),
    )


def _is_weight(pass_: Pass, name: str) -> bool:
    """Return whether a buffer is a weight, or computed from a weight alone."""
    maker = pass_.maker(name)
    if maker is None:
        return name.endswith("weight")
    step = pass_.steps[maker]
    return step.op.removeprefix(GROUPED) == "convert" or (
        isinstance(step.settings, CastSettings) and step.settings.tensor == "weight"
    )


_schedules: Memory[Pass, Schedule] = Memory(_scheduled, 4096)


def schedule_of(pass_: Pass) -> Schedule:
    """Return the schedule of a pass, made at the first call; a tracing compiler writes to no cache."""
    return _scheduled(pass_) if torch.compiler.is_compiling() else _schedules[pass_]


# Called as watch(pass, number of the step, its results) after every step, for reports.
watchers: list[Callable[[Pass, int, tuple[Any, ...]], None]] = []


@without_autocast
def run(schedule: Schedule, env: Environment, given: list[Any]) -> tuple[list[Any], list[Any]]:
    """Run a pass.

    Args:
        schedule: The pass, see `schedule_of`.
        env: Objects to which the settings of the steps refer.
        given: The inputs in order. The list is emptied, so that each input is freed after its last reader.

    Returns:
        The results and the saved buffers; None for absent ones.
    """
    if offloading.used or watchers or torch.compiler.is_compiling():
        return _run_watched(schedule, env, given)
    steps, results_of, saved_of, empty = schedule.getters
    values: list[Any] = [*given, *empty]
    given.clear()
    for place in schedule.unread:
        values[place] = None
    for op, settings, inputs_of, made, freed in steps:
        results = OPERATIONS[op](env, settings, *inputs_of(values))
        for place in freed:
            values[place] = None
        for place, position in made:
            values[place] = results[position]
        del results  # otherwise they would exist until the end of the next step
    return list(results_of(values)), list(saved_of(values))


def _run_watched(schedule: Schedule, env: Environment, given: list[Any]) -> tuple[list[Any], list[Any]]:
    """Run a pass of which saved tensors are offloaded, watchers are called, or a compiler makes a graph."""
    values: list[Any] = [*given, *[None] * (schedule.size + 1 - len(given))]
    given.clear()
    for place in schedule.unread:
        values[place] = None
    offloads = offloading.synchronizer is not None
    for number, step in enumerate(schedule.steps):  # not unpacked, which torch 2.11 does not trace
        if offloading.used:
            for place in step.arriving:
                wait_for_saved(values[place])
        results = OPERATIONS[step.op](env, step.settings, *[values[place] for place in step.inputs])
        for watch in watchers:
            watch(schedule.pass_, number, results)
        for place in step.freed:
            values[place] = None
        for place, position in step.made:
            if place not in step.freed:
                values[place] = results[position]
        del results
        if offloads:
            for place in step.saved:
                if place not in schedule.saved_weights:
                    mark_ready(values[place])
    kept = [values[place] for place in schedule.saved]
    if offloads:
        for place in schedule.saved_weights:
            keep_weight(values[place])
    return [values[place] for place in schedule.results], kept
