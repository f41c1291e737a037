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
    """An attention that is differentiable by itself in all that its backend takes."""

    name: str
    run: Callable[[AttentionRequest, AttentionInputs], AttentionResult]

    def __call__(self, request: AttentionRequest, inputs: AttentionInputs) -> AttentionResult:
        """The attention of a request."""
        return self.run(request, inputs)


Bound = Passes | Whole
