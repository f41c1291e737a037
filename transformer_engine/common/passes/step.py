"""Step and Pass: the forward or the backward pass of a layer as data.

A `Pass` is a list of `Step`s over named buffers, in single assignment form: every buffer is an input of the pass or a
result of exactly one step. Executors run, compile, predict and explain a pass; rules (`rules.py`) rewrite it into an
equivalent one; `schedule.py` computes where each buffer is last read. Nothing here imports a tensor library, and a
pass holds no tensors: settings name the linear layers and quantizers of the caller's environment.

`vocabulary.py` lists the operations with their inputs, results and settings.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Step:
    """One operation: results = op(settings)(*inputs).

    Attributes:
        op: Name of the operation, a key of `vocabulary.OPERATIONS`.
        inputs: Names of the buffers that the operation reads, by position; None for an optional input that is absent.
        results: Names of the buffers that it makes, by position; None for a result that is not made.
        settings: Hashable settings of the operation, or None.
    """

    op: str
    inputs: tuple[str | None, ...]
    results: tuple[str | None, ...]
    settings: Hashable = None

    def reads(self) -> tuple[str, ...]:
        """Return the names of the buffers that the step reads."""
        return tuple([name for name in self.inputs if name is not None])

    def makes(self) -> tuple[str, ...]:
        """Return the names of the buffers that the step makes."""
        return tuple([name for name in self.results if name is not None])

    def __str__(self) -> str:
        made = ", ".join(["_" if name is None else name for name in self.results])
        read = ", ".join(["None" if name is None else name for name in self.inputs])
        text = f"{made} = {self.op}({read})"
        return text if self.settings is None else f"{text}  [{self.settings}]"


@dataclass(frozen=True, slots=True)
class Pass:
    """The forward or the backward pass of a layer.

    Attributes:
        inputs: Buffers that the caller provides. A backward pass takes the output gradients, then the saved buffers of
            its forward pass.
        results: Buffers that the caller gets, by position; None for a result that does not exist.
        saved: Buffers that a forward pass keeps for its backward pass, by position; None for one that is not needed.
        steps: The steps in order.

    Raises:
        ValueError: A step, result or saved entry reads a buffer that no earlier step makes, or two steps make one.
    """

    inputs: tuple[str, ...]
    results: tuple[str | None, ...]
    saved: tuple[str | None, ...]
    steps: tuple[Step, ...]

    def __post_init__(self) -> None:
        known = set(self.inputs)
        for step in self.steps:
            if absent := [name for name in step.reads() if name not in known]:
                raise ValueError(
                    f"step `{step}` reads {absent[0]!r}, which no earlier step makes; add that step"
                )
            if twice := [name for name in step.makes() if name in known]:
                raise ValueError(
                    f"step `{step}` makes {twice[0]!r} a second time; give the result another name"
                )
            known.update(step.makes())
        for name in (*self.results, *self.saved):
            if name is not None and name not in known:
                raise ValueError(f"no step makes {name!r}, which the pass returns or saves; add that step")

    def kept(self) -> frozenset[str]:
        """Return the buffers that outlive the pass: its results and saved buffers."""
        return frozenset([name for name in (*self.results, *self.saved) if name is not None])

    def maker(self, name: str) -> int | None:
        """Return the index of the step that makes a buffer; None for an input of the pass."""
        return next((i for i, step in enumerate(self.steps) if name in step.results), None)

    def readers(self, name: str) -> tuple[int, ...]:
        """Return the indices of the steps that read a buffer."""
        return tuple([i for i, step in enumerate(self.steps) if name in step.inputs])

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"inputs: {', '.join(self.inputs)}"
        for step in self.steps:
            yield f"  {step}"
        yield f"results: {', '.join(['None' if name is None else name for name in self.results])}"
        if self.saved:
            yield f"saved: {', '.join(['None' if name is None else name for name in self.saved])}"


def replaced(pass_: Pass, first: int, second: int, step: Step, at: int) -> Pass:
    """Return the pass with two of its steps replaced by one.

    Args:
        pass_: The pass.
        first: Index of the earlier step.
        second: Index of the later step.
        step: The step that replaces both.
        at: Index of the one whose place it takes.
    """
    steps = [
        step if i == at else old
        for i, old in enumerate(pass_.steps)
        if i in (at,) or i not in (first, second)
    ]
    return Pass(pass_.inputs, pass_.results, pass_.saved, tuple(steps))
