"""score_mod of an attention, in either contract, with its tensors bound.

score_mod(score, b, h, i, j, **tensors) takes indices. score_mod(graph, score, tensors) builds a cuDNN graph.
The backend cudnn adds the recorded graph to its own; for other backends, `ScoreGraph` computes the operations
on tensors. score_mod_bprop computes the score gradient in the same contract: score_mod_bprop(gradient, score,
b, h, i, j, **tensors), or score_mod_bprop(graph, gradient, tensors).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ....common.checks import described, function_or_none
from ....common.dispatch import is_tracing
from ....common.score_graph import ScoreGraph, builds_a_graph
from ....common.score_program import (
    FIRST_OPERAND,
    GRADIENT,
    SCORE,
    RecordedScoreMod,
    ScoreProgram,
    record,
)
from ...runtime.autograd import Function
from ...runtime.double_backward import once_differentiable

Places = tuple[Tensor, Tensor, Tensor, Tensor]


class BoundScoreMod:
    """A score_mod with named tensors; equal to another with the same functions and tensor objects.

    `bprop` computes its gradient and reads `bprop_tensors`; None: autograd computes the gradient.
    """

    def __init__(
        self,
        function: Callable[..., Tensor],
        tensors: Mapping[str, Tensor],
        bprop: Callable[..., Tensor] | None,
        bprop_tensors: Mapping[str, Tensor],
    ):
        self.function = function
        self.tensors = dict(tensors)
        self.bprop = bprop
        self.bprop_tensors = dict(bprop_tensors)
        named = (*self.tensors.items(), *self.bprop_tensors.items())
        self._key: tuple[Any, ...] = (
            function,
            bprop,
            len(self.tensors),
            tuple((name, id(tensor)) for name, tensor in named),
        )

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        places = (b, h, i, j)
        if self.bprop is None:
            return self.forward(score, places)
        return _WithGradient.apply(score, places, self)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def forward(self, score: Tensor, places: Places) -> Tensor:
        """Return the modified scores."""
        return self.function(score, *places, **self.tensors)

    def backward(self, score: Tensor, gradient: Tensor, places: Places) -> Tensor:
        """Return the score gradient, from the modified scores' gradient."""
        assert self.bprop is not None
        return self.bprop(gradient, score, *places, **self.bprop_tensors)


class GraphScoreMod(BoundScoreMod):
    """A score_mod that builds a graph.

    Attributes:
        recorded: The recorded graph, or the reason why the functions cannot be recorded, and the tensors; the backend
            cudnn reads it. Each construction records the functions again, so that a changed closure changes the
            program, which is part of the key.
    """

    def __init__(
        self,
        function: Callable[..., Tensor],
        tensors: Mapping[str, Tensor],
        bprop: Callable[..., Tensor] | None,
        bprop_tensors: Mapping[str, Tensor],
    ):
        super().__init__(function, tensors, bprop, bprop_tensors)
        program: ScoreProgram | str = "a compiler traces it"
        if not is_tracing():
            program = record(function, self.tensors, bprop, self.bprop_tensors)
            differentiated = tuple(
                tensor.requires_grad for tensor in (*tensors.values(), *bprop_tensors.values())
            )
            self._key = (*self._key, program, differentiated)
        self.recorded = RecordedScoreMod(program, self.tensors, self.bprop_tensors)

    def forward(self, score: Tensor, places: Places) -> Tensor:
        """Return the modified scores."""
        tensors = _index_tensors(self.tensors, places)
        program = self.recorded.program
        if isinstance(program, ScoreProgram) and program.configures:
            return program.compute(ScoreGraph(torch, places), _number_inputs(score, tensors))
        return self.function(ScoreGraph(torch, places), score, tensors)

    def backward(self, score: Tensor, gradient: Tensor, places: Places) -> Tensor:
        """Return the score gradient; bprop may read the function's results, as in one graph."""
        assert self.bprop is not None
        program = self.recorded.program
        if isinstance(program, ScoreProgram) and program.configures:
            values = _number_inputs(
                score,
                _index_tensors(self.tensors, places),
                _index_tensors(self.bprop_tensors, places),
            )
            program.compute(ScoreGraph(torch, places), values)
            values[GRADIENT] = gradient
            return program.compute_gradient(ScoreGraph(torch, places), values)
        self.forward(score, places)
        return self.bprop(
            ScoreGraph(torch, places), gradient, _index_tensors(self.bprop_tensors, places)
        )


def _number_inputs(score: Tensor, *named: Mapping[str, Tensor]) -> dict[int, Tensor]:
    """Return the inputs of a program by number: the scores and the tensors, in order."""
    tensors = [tensor for mapping in named for tensor in mapping.values()]
    return {SCORE: score, **dict(enumerate(tensors, FIRST_OPERAND))}


class _WithGradient(Function):
    """Scores modified by a function whose gradient is given; the tensors get none."""

    @staticmethod
    def forward(ctx: Any, score: Tensor, places: Places, modifier: BoundScoreMod) -> Tensor:
        ctx.save_for_backward(score)
        ctx.places, ctx.modifier = places, modifier
        return modifier.forward(score, places)

    @staticmethod
    @once_differentiable("score_mod_bprop")
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        (score,) = ctx.saved_tensors
        return ctx.modifier.backward(score, grad_output, ctx.places), None, None


def _index_tensors(tensors: Mapping[str, Tensor], places: Places) -> dict[str, Tensor]:
    """Return the elements of tensors [1 | b, 1 | h, 1 | q, 1 | k] at some places; one element belongs to all places."""
    index_tensors: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        tensor = tensor.to(places[0].device)
        if tensor.numel() == 1:
            index_tensors[name] = tensor.reshape(())
        elif tensor.dim() != 4:
            raise ValueError(
                f"score_mod_tensors[{name!r}] is {list(tensor.shape)}; give one element, or 4 dimensions that "
                "broadcast to [batch, heads, queries, keys]"
            )
        else:
            index = [
                0 if size == 1 else position
                for size, position in zip(tensor.shape, places, strict=True)
            ]
            index_tensors[name] = tensor[tuple(index)]
    return index_tensors


def bound_score_mod(
    score_mod: Callable[..., Tensor] | None,
    tensors: Mapping[str, Tensor] | None,
    score_mod_bprop: Callable[..., Tensor] | None,
    bprop_tensors: Mapping[str, Tensor] | None,
) -> Callable[..., Tensor] | None:
    """Return the score_mod of a call with its tensors bound.

    Raises:
        TypeError: A function or the tensors have the wrong type.
        ValueError: Tensors or a gradient are given without the function that they belong to.
    """
    function_or_none("score_mod", score_mod)
    function_or_none("score_mod_bprop", score_mod_bprop)
    without = {}
    if score_mod is None:
        without = {"score_mod_bprop": score_mod_bprop, "score_mod_tensors": tensors}
    for name, value in without.items():
        if value is not None:
            raise ValueError(f"{name}={described(value)} without score_mod; give both, or neither")
    if score_mod_bprop is None and bprop_tensors is not None:
        raise ValueError(
            f"score_mod_bprop_tensors={described(bprop_tensors)} without score_mod_bprop; give both, or neither"
        )
    if score_mod is None:
        return None
    graph = builds_a_graph(score_mod)
    if tensors is None and score_mod_bprop is None and not graph:
        return score_mod
    return (GraphScoreMod if graph else BoundScoreMod)(
        score_mod,
        _check_tensors("score_mod_tensors", tensors),
        score_mod_bprop,
        _check_tensors("score_mod_bprop_tensors", bprop_tensors),
    )


def _check_tensors(name: str, tensors: Mapping[str, Tensor] | None) -> Mapping[str, Tensor]:
    """Return named tensors, none for None."""
    if tensors is None:
        return {}
    if not isinstance(tensors, Mapping):
        raise TypeError(
            f"{name}={described(tensors)} is not a mapping; give a dict of named tensors"
        )
    wrong = [key for key, tensor in tensors.items() if not isinstance(tensor, Tensor)]
    if wrong:
        raise TypeError(
            f"{name} holds no tensor under {', '.join(map(repr, wrong))}; give a dict of named tensors"
        )
    return tensors
