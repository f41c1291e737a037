"""A backend bound to a call: separate forward and backward functions, or one function with its own autograd.

`functions.attention.autograd` makes all backends with separate passes differentiable. `Differentiable` is for
libraries that couple both passes, and for operations that autograd itself differentiates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from .call import Attended, AttentionCall, AttentionInputs, AttentionResult, Gradients


class Passes(NamedTuple):
    """Forward and backward function of a backend; the output gradient is passed contiguous.

    Attributes:
        backward_into: `backward` with a further argument, tensors that become the gradients of q, k and v. They have
            the strides of q, k and v. Packed tokens that belong to no sequence are not written. None if the backend
            allocates its gradients.
    """

    name: str
    forward: Callable[[AttentionCall, AttentionInputs], Attended]
    backward: Callable[[AttentionCall, AttentionInputs, Attended, Tensor], Gradients]
    backward_into: (
        Callable[
            [AttentionCall, AttentionInputs, Attended, Tensor, tuple[Tensor, Tensor, Tensor]],
            Gradients,
        ]
        | None
    ) = None

    def __call__(self, call: AttentionCall, inputs: AttentionInputs) -> AttentionResult:
        """Compute attention for a call that needs no gradient."""
        attended = self.forward(call, inputs)
        return AttentionResult(attended.output.flatten(-2), attended.max_logit)


class Differentiable(NamedTuple):
    """An attention that is differentiable by itself.

    Attributes:
        name: Backend name.
        run: Computes the attention.
        as_passes: Returns the same kernels as two passes, for a node that computes more than an attention; None if the
            library does not provide them for these inputs.
    """

    name: str
    run: Callable[[AttentionCall, AttentionInputs], AttentionResult]
    as_passes: Callable[[AttentionCall, AttentionInputs], Passes | None] | None = None

    def __call__(self, call: AttentionCall, inputs: AttentionInputs) -> AttentionResult:
        """Compute the attention of a call."""
        return self.run(call, inputs)


Bound = Passes | Differentiable
