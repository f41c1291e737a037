"""A backend bound to a request: two plain functions of tensors, or one that has an autograd of its own.

`functions.attention.autograd` makes the one differentiable of all backends that have their passes apart. Where a
library ties the two together, or autograd has to see every operation, `Whole` says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from .request import Attended, AttentionInputs, AttentionRequest, AttentionResult, Gradients

Forward = Callable[[AttentionRequest, AttentionInputs], Attended]
Backward = Callable[[AttentionRequest, AttentionInputs, Attended, Tensor], Gradients]


class Passes(NamedTuple):
    """Forward and backward of one backend; whoever calls backward gives a contiguous gradient of the output."""

    name: str
    forward: Forward
    backward: Backward

    def __call__(self, request: AttentionRequest, inputs: AttentionInputs) -> AttentionResult:
        """The attention of a request that needs no gradient."""
        attended = self.forward(request, inputs)
        return AttentionResult(attended.output.flatten(-2), attended.max_logit)


class Whole(NamedTuple):
    """An attention that is differentiable by itself in all that its backend takes.

    apart   the same kernels as two passes, for a node that computes more than an attention; None where the library
            does not give them for these inputs
    """

    name: str
    run: Callable[[AttentionRequest, AttentionInputs], AttentionResult]
    apart: Callable[[AttentionRequest, AttentionInputs], Passes | None] | None = None

    def __call__(self, request: AttentionRequest, inputs: AttentionInputs) -> AttentionResult:
        """The attention of a request."""
        return self.run(request, inputs)


Bound = Passes | Whole


def passes_apart(bound: object, request: AttentionRequest, inputs: AttentionInputs) -> Passes | None:
    """The two passes of what a request is bound to; None where there are none."""
    if type(bound) is Passes:
        return bound
    return bound.apart(request, inputs) if type(bound) is Whole and bound.apart is not None else None
