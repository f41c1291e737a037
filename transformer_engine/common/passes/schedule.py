"""When buffers of a pass are made, read last and freed, and where its communication waits."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .step import Pass, Step
from .vocabulary import Product

BEGIN, WAIT = ".begin", ".wait"


@dataclass(frozen=True, slots=True)
class Buffer:
    """The lifetime of a named buffer.

    Attributes:
        name: Name in the pass.
        made_by: Index of the step that makes it; None for an input of the pass.
        first_read: Index of the first step that reads it; None if no step does.
        last_read: Index of the last step that reads it; None if no step does.
        kept: The pass returns or saves it, so that it outlives the pass.
    """

    name: str
    made_by: int | None
    first_read: int | None
    last_read: int | None
    kept: bool


def buffers(pass_: Pass) -> dict[str, Buffer]:
    """Return {name: lifetime} of every buffer, inputs first, then in the order in which steps make them."""
    kept = pass_.kept()
    made: list[tuple[str, int | None]] = [(name, None) for name in pass_.inputs]
    made += [(name, i) for i, step in enumerate(pass_.steps) for name in step.makes()]
    found: dict[str, Buffer] = {}
    for name, maker in made:
        readers = pass_.readers(name)
        first, last = (readers[0], readers[-1]) if readers else (None, None)
        found[name] = Buffer(name, maker, first, last, name in kept)
    return found


def freed_after(pass_: Pass) -> tuple[tuple[str, ...], ...]:
    """Return, for every step, the buffers that no later step reads and that the pass does not keep.

    A result that no step reads and that is not kept is freed after the step that makes it.
    """
    freed: list[list[str]] = [[] for _ in pass_.steps]
    for buffer in buffers(pass_).values():
        last = buffer.made_by if buffer.last_read is None else buffer.last_read
        if not buffer.kept and last is not None:
            freed[last].append(buffer.name)
    return tuple([tuple(names) for names in freed])


def needed_for(pass_: Pass, results: tuple[str | None, ...], saved: tuple[str | None, ...]) -> Pass:
    """Return the steps of a pass that are needed for some of its buffers.

    Args:
        pass_: The pass.
        results: Buffers that the new pass returns.
        saved: Buffers that the new pass saves.
    """
    wanted = {name for name in (*results, *saved) if name is not None}
    steps: list[Step] = []
    for step in reversed(pass_.steps):
        if not wanted.isdisjoint(step.makes()):
            settings = step.settings
            if (
                step.results[-1] not in wanted
                and isinstance(settings, Product)
                and settings.activation == "gelu"
            ):
                # The product itself, the second result, is not stored.
                step = Step(step.op, step.inputs, (step.results[0], None), replace(settings, keeps=False))
            steps.append(step)
            wanted.update(step.reads())
    return Pass(pass_.inputs, results, saved, tuple(reversed(steps)))


def overlap(pass_: Pass) -> Pass:
    """Overlap communication with computation: begin each collective early and wait for it late.

    A `.begin` step moves up to directly behind the step that makes its input, a `.wait` step down to directly before
    the first step that reads its result. A `.begin` step that reads an input of the pass keeps its place: earlier, its
    result would only be in memory longer. Other steps keep their order, and collectives keep theirs: all ranks begin
    them in the same order. Results do not change.
    """
    steps = list(pass_.steps)
    for step in [step for step in steps if step.op.endswith(BEGIN)]:
        if pass_.maker(step.reads()[0]) is not None:
            at = steps.index(step)
            while (
                at
                and not steps[at - 1].op.endswith(BEGIN)
                and not set(step.reads()) & set(steps[at - 1].makes())
            ):
                steps[at - 1], steps[at] = step, steps[at - 1]
                at -= 1
    for step in reversed([step for step in steps if step.op.endswith(WAIT)]):
        at = steps.index(step)
        while (
            at + 1 < len(steps)
            and not steps[at + 1].op.endswith(WAIT)
            and not set(step.makes()) & set(steps[at + 1].reads())
        ):
            steps[at + 1], steps[at] = step, steps[at + 1]
            at += 1
    return Pass(pass_.inputs, pass_.results, pass_.saved, tuple(steps))
