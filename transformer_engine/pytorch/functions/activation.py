"""y = f(x), or y [.., F] = f(x[.., :F]) * x[.., F:] for gated units, differentiable in x."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from ..primitives.activation import (
    DEFAULT_PARAMS,
    ActivationParams,
    activation_backward,
    activation_forward,
    reference,
)
from ..runtime.autograd import Function
from ..runtime.double_backward import is_recorded, replay


def activation(name: str, x: Tensor, params: ActivationParams = DEFAULT_PARAMS) -> Tensor:
    """y in x's dtype, by a name in `primitives.activation.ACTIVATIONS`; saves x only."""
    return _Activation.apply(x, name, params)


class _Activation(Function):
    OPERATION = "an activation"

    @staticmethod
    def forward(ctx, x, name, params):
        ctx.save_for_backward(x)
        ctx.name, ctx.params = name, params
        y = activation_forward(name, x, params)
        # torch 2.11 compiles a zero gradient when the last operation returns its own argument, as a
        # cast to the same dtype does; a view does not.
        return y.view(y.shape)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        if is_recorded():
            program = partial(reference.value, ctx.name, constants=ctx.params.constants)
            return *replay(program, (x,), dy), None, None
        return activation_backward(ctx.name, dy, x, ctx.params), None, None
