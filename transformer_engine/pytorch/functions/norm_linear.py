"""Layers that begin with a norm: norm(x) @ w.T + b, and act(norm(x) @ w1.T + b1) @ w2.T + b2, differentiable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from ...common.passes.norm_linear import ACTIVATION, NORM
from ...common.passes.rules import (
    ACTIVATION_GRADIENT_IN_PRODUCT,
    ACTIVATION_IN_PRODUCT,
    CODES_AND_SUMS_FROM_PRODUCER,
    CODES_FROM_PRODUCER,
)
from ..primitives.activation import ActivationParams
from ..runtime.autograd import Function, applier
from .fusions import IN_CODES, IN_PRODUCT, SEPARATE, mlp_activation, mlp_gradient, norm_output
from .layer import backward_of_layer, forward_of, gradients_of, infer
from .layer_passes import LayerPasses, fusion, layer_passes, linear_facts, linear_fusions
from .linear_spec import LINEAR, Dtypes, Environment, LayerSpec, LinearSpec
from .normalization import Norm
from .run import run
from .saving import backward_of, save, take_saved

FC1, FC2 = "fc1", "fc2"


@dataclass(frozen=True)
class NormLinearSpec(LayerSpec):
    """A norm and a linear layer.

    Attributes:
        norm: The norm.
        linear: The linear layer.
        beta: The norm has an additive parameter.
        bias: The product adds a bias.
        returns_norm_output: The caller also gets norm(x).
    """

    norm: Norm
    linear: LinearSpec
    beta: bool = False
    bias: bool = False
    returns_norm_output: bool = False

    def chosen(self) -> NormLinearSpec:
        """Return the spec with its passes, in which the norm makes codes where a kernel can."""
        return self._with_passes(norm_output(self.linear, self.returns_norm_output))

    def with_norm(self, norm: Any) -> NormLinearSpec:
        """Return the spec with another norm, which makes no codes."""
        return replace(self, norm=norm, compiled=None)._with_passes(SEPARATE)

    def _with_passes(self, mode: str) -> NormLinearSpec:
        norm = (self.beta, self.norm.kind == "LayerNorm", self.returns_norm_output)
        allowed = linear_fusions(self.linear, LINEAR)
        if mode == IN_CODES:
            allowed += (fusion(CODES_FROM_PRODUCER, LINEAR, "input"),)
        facts = (linear_facts(self.linear, LINEAR, self.bias),)
        return replace(self, passes=layer_passes("norm_linear", facts, allowed, norm))

    def linears(self) -> dict[str, LinearSpec]:
        return {LINEAR: self.linear}

    def environment(self, dtypes: Dtypes, leading: tuple[int, ...]) -> Environment:
        of_gradients: dict[str, Any] = dict(zip((LINEAR,), dtypes, strict=False))
        return Environment({LINEAR: self.linear}, of_gradients, leading, {NORM: self.norm})


def norm_linear(
    x: Tensor, gamma: Tensor, beta: Tensor | None, weight: Tensor, bias: Tensor | None, spec: NormLinearSpec
) -> tuple[Tensor, Tensor | None]:
    """Compute (y [.., N], norm(x) [.., K] or None), differentiable in every tensor."""
    if not spec.needs_grad:
        y, norm_output, *_ = infer("LayerNormLinear", spec, (x, gamma, beta, weight, bias))
        return y, norm_output
    outputs = _norm_linear(x, gamma, beta, weight, bias, spec)
    return outputs if spec.returns_norm_output else (outputs, None)  # pyright: ignore[reportReturnType]


class _NormLinear(Function):
    @staticmethod
    def forward(ctx: Any, x: Any, gamma: Any, beta: Any, weight: Any, bias: Any, spec: NormLinearSpec) -> Any:
        dtypes = (weight.dtype, weight.dtype if bias is None else bias.dtype)
        y, norm_output = forward_of(ctx, spec, (x, gamma, beta, weight, bias), (dtypes,))
        # torch 2.11 cannot trace the backward of an output that is None.
        return y if norm_output is None else (y, norm_output)

    @staticmethod
    @backward_of("LayerNormLinear")
    def backward(ctx: Any, grad_output: Tensor, grad_norm_output: Tensor | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        dx, dgamma, dbeta, *rest = backward_of_layer(ctx, (grad_output, grad_norm_output))
        return dx, dgamma, dbeta if ctx.needs_input_grad[2] else None, *rest, None


_norm_linear = applier(_NormLinear)


class FusionModes(NamedTuple):
    """How norm(x), the activation's output and the gradient of fc1's output are made: modes of `fusions`."""

    norm: str
    activation: str
    gradient: str


@dataclass(frozen=True)
class NormMLPSpec(LayerSpec):
    """A norm, two linear layers, and the activation between them.

    Attributes:
        norm: The norm.
        fc1: The first linear layer.
        fc2: The second linear layer.
        activation: Name of the activation.
        activation_params: Its parameters.
        beta: The norm has an additive parameter.
        biases: fc1's and fc2's product add a bias.
        returns_norm_output: The caller also gets norm(x).
        recompute: The backward pass recomputes the results of norm, fc1 and activation that it reads.
        fusion_modes: How matrices between the steps are made; None before `chosen`.
    """

    norm: Norm
    fc1: LinearSpec
    fc2: LinearSpec
    activation: str
    activation_params: ActivationParams
    beta: bool = False
    biases: tuple[bool, bool] = (False, False)
    returns_norm_output: bool = False
    recompute: bool = False
    fusion_modes: FusionModes | None = None

    def chosen(self) -> NormMLPSpec:
        """Return the spec with its passes, in which norm and activation are merged with products where that pays."""
        gradient = mlp_gradient(self.activation, self.fc1, self.fc2) if self.needs_grad else SEPARATE
        fusion_modes = FusionModes(
            norm_output(self.fc1, self.returns_norm_output),
            mlp_activation(self.activation, self.fc1, self.fc2),
            gradient,
        )
        return self._with_passes(fusion_modes)

    def with_norm(self, norm: Any) -> NormMLPSpec:
        """Return the spec with another norm, which makes no codes."""
        assert self.fusion_modes is not None, "the passes of a spec are chosen before its norm is replaced"
        return replace(self, norm=norm, compiled=None)._with_passes(self.fusion_modes._replace(norm=SEPARATE))

    def _with_passes(self, fusion_modes: FusionModes) -> NormMLPSpec:
        allowed = (*linear_fusions(self.fc1, FC1), *linear_fusions(self.fc2, FC2))
        if fusion_modes.norm == IN_CODES:
            allowed += (fusion(CODES_FROM_PRODUCER, FC1, "input"),)
        if fusion_modes.activation == IN_CODES:
            allowed += (fusion(CODES_FROM_PRODUCER, FC2, "input"),)
        elif fusion_modes.activation == IN_PRODUCT:
            allowed += (fusion(ACTIVATION_IN_PRODUCT, FC1),)
        if fusion_modes.gradient == IN_CODES:
            for rule in (CODES_FROM_PRODUCER, CODES_AND_SUMS_FROM_PRODUCER):
                allowed += (fusion(rule, FC1, "grad_output"),)
        elif fusion_modes.gradient == IN_PRODUCT:
            allowed += (fusion(ACTIVATION_GRADIENT_IN_PRODUCT, FC2),)
        facts = (linear_facts(self.fc1, FC1, self.biases[0]), linear_facts(self.fc2, FC2, self.biases[1]))
        norm = (self.beta, self.norm.kind == "LayerNorm", self.returns_norm_output)
        passes = layer_passes("norm_mlp", facts, allowed, norm, self.activation)
        return replace(self, fusion_modes=fusion_modes, passes=passes)

    def linears(self) -> dict[str, LinearSpec]:
        return {FC1: self.fc1, FC2: self.fc2}

    def environment(self, dtypes: Dtypes, leading: tuple[int, ...]) -> Environment:
        return Environment(
            self.linears(),
            dict(zip((FC1, FC2), dtypes, strict=False)),
            leading,
            {NORM: self.norm},
            {ACTIVATION: (self.activation, self.activation_params)},
        )


class NormMLPTensors(NamedTuple):
    """x [.., H], gamma [H], beta [H], fc1 [F or 2F, H] and fc2 [H, F] with their biases, which have x's dtype."""

    x: Tensor
    gamma: Tensor
    beta: Tensor | None
    fc1_weight: Tensor
    fc1_bias: Tensor | None
    fc2_weight: Tensor
    fc2_bias: Tensor | None


def norm_mlp(tensors: NormMLPTensors, spec: NormMLPSpec) -> tuple[Tensor, Tensor | None]:
    """Compute (y [.., H], norm(x) or None), differentiable in every tensor."""
    if not spec.needs_grad:
        y, norm_output, *_ = infer("LayerNormMLP", spec, tensors)
        return y, norm_output
    outputs = _norm_mlp(spec, *tensors)
    return outputs if spec.returns_norm_output else (outputs, None)  # pyright: ignore[reportReturnType]


def _forward_quantizers(spec: NormMLPSpec) -> tuple[Any, ...]:
    return (spec.fc1.input, spec.fc1.weight, spec.fc2.input, spec.fc2.weight)


def _recomputed(ctx: Any, grads: Sequence[Tensor | None]) -> Sequence[Any]:
    """Make the saved buffers again from the input, and run the backward pass on them."""
    count = len(NormMLPTensors._fields)
    kept = take_saved(ctx)
    # Quantizers repeat the quantization of the forward pass and record nothing.
    spec, replayed, start = ctx.spec, [], count
    for quantizer in _forward_quantizers(spec):
        end = start + len(quantizer.replay_state())
        replayed.append(quantizer.replaying(tuple(kept[start:end])))
        start = end
    fc1 = replace(spec.fc1, input=replayed[0], weight=replayed[1])
    spec = replace(spec, fc1=fc1, fc2=replace(spec.fc2, input=replayed[2], weight=replayed[3])).chosen()
    passes: LayerPasses = spec.passes
    env = spec.environment(ctx.dtypes, tuple(ctx.input_shape[:-1]))
    given = run(passes.again, env, [tensor for tensor in kept[:count] if tensor is not None])[1]
    del kept
    given[:0] = [grad for grad in grads if grad is not None]
    return gradients_of(spec, passes, given, ctx.dtypes, ctx.input_shape)


class _NormMLP(Function):
    @staticmethod
    def forward(ctx: Any, spec: NormMLPSpec, *tensors: Any) -> Any:
        fc1, fc2 = tensors[3].dtype, tensors[5].dtype
        dtypes = ((fc1, fc1), (fc2, fc2))
        if spec.recompute:
            states = [state for quantizer in _forward_quantizers(spec) for state in quantizer.replay_state()]
            y, norm_output = infer("LayerNormMLP", spec, tensors)
            save(ctx, (*tensors, *states), (), spec.scale_update)
            ctx.spec, ctx.dtypes, ctx.input_shape = spec, dtypes, tensors[0].shape
        else:
            y, norm_output = forward_of(ctx, spec, tensors, dtypes)
        # torch 2.11 cannot trace the backward of an output that is None.
        return y if norm_output is None else (y, norm_output)

    @staticmethod
    @backward_of("LayerNormMLP")
    def backward(ctx: Any, grad_output: Tensor, grad_norm_output: Tensor | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        gradients = _recomputed if ctx.spec.recompute else backward_of_layer
        dx, dgamma, dbeta, *rest = gradients(ctx, (grad_output, grad_norm_output))
        return None, dx, dgamma, dbeta if ctx.needs_input_grad[3] else None, *rest


_norm_mlp = applier(_NormMLP)
