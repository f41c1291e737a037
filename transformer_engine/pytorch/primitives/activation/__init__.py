"""y = f(x) and dx = dy * f'(x) for the twelve activations, and the table of backends that compute them."""

from __future__ import annotations

from torch import Tensor

from ....common.dispatch import Table
from . import reference, triton
from .request import ACTIVATIONS, DEFAULT_PARAMS, Activation, ActivationParams, ActivationRequest

TABLE: Table[ActivationRequest] = Table("activation", (triton.BACKEND, reference.BACKEND))


def activation_forward(name: str, x: Tensor, params: ActivationParams = DEFAULT_PARAMS) -> Tensor:
    """y = f(x) [...], or for gated units y [..., F] = f(x[..., :F]) * x[..., F:]; y in x's dtype."""
    _check(name, x)
    request = ActivationRequest(name, False, x.shape, x.dtype, x.device)
    return TABLE.select(request).run(False)(name, x, params)


def activation_backward(
    name: str, dy: Tensor, x: Tensor, params: ActivationParams = DEFAULT_PARAMS
) -> Tensor:
    """dx, shaped and typed like x; dy is shaped like the output of activation_forward."""
    _check(name, x)
    request = ActivationRequest(name, True, x.shape, x.dtype, x.device)
    return TABLE.select(request).run(True)(name, dy, x, params)


def _check(name: str, x: Tensor) -> None:
    activation = ACTIVATIONS.get(name)
    if activation is None:
        raise ValueError(f"there is no activation {name!r}; choose one of {', '.join(ACTIVATIONS)}")
    if activation.gated and x.shape[-1] % 2:
        raise ValueError(
            f"{name} halves the last dimension, and {x.shape[-1]} is odd; "
            "give it [..., 2F], activated half first"
        )
