"""y [.., N] = x [.., K] @ weight [N, K].T + bias [N], differentiable, in the formats of the quantizers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..runtime.autograd import Function, applier
from .layer import backward_of_layer, forward_of, infer
from .layer_passes import LayerPasses, layer_passes, linear_facts, linear_fusions
from .linear_spec import LINEAR, LinearSpec, changed
from .saving import backward_of


def passes_of(spec: LinearSpec, bias: bool) -> LayerPasses:
    """Return the passes of a layer that is one product, with or without a bias."""
    return layer_passes("linear", (linear_facts(spec, LINEAR, bias),), linear_fusions(spec, LINEAR))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, spec: LinearSpec) -> Tensor:
    """Compute y [.., N] = x [.., K] @ weight [N, K].T + bias [N], differentiable in all three tensors."""
    if spec.passes is None:
        spec = changed(spec, passes=passes_of(spec, bias is not None))
    if spec.needs_grad_input or spec.needs_grad_weight or spec.needs_grad_bias:
        return _applied(x, weight, bias, spec)  # pyright: ignore[reportReturnType]
    return infer("Linear", spec, (x, weight, bias))[0]


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, spec: LinearSpec) -> Any:
        dtypes = (weight.dtype, weight.dtype if bias is None else bias.dtype)
        return forward_of(ctx, spec, (x, weight, bias), (dtypes,))[0]

    @staticmethod
    @backward_of("Linear")
    def backward(ctx: Any, grad_output: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return *backward_of_layer(ctx, (grad_output,)), None


_applied = applier(_Linear)
