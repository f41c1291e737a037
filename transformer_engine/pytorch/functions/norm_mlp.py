"""y = act(norm(x) @ w1.T + b1) @ w2.T + b2: a norm, two linear layers and an activation, from their functions.

GELU between unquantized products is part of them: fc1's writes gelu(x) beside x, and fc2's input gradient is made as
dx = dy @ w2 * gelu'(x), so that the gradient of gelu(x) [M, F] is never in memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..offload.marks import whole_now
from ..primitives.activation import ActivationParams, activation_backward, activation_forward
from ..primitives.gemm import Epilogue, gemm_gelu, gemm_gelu_gradient
from ..primitives.operand import Operand
from ..runtime.applying import applier
from ..runtime.tracing import result_in
from ..tensor.quantizer import Operands, Quantizer
from .fusions import APART, IN_CODES, IN_PRODUCT, mlp_activation, mlp_gradient, norm_output
from .linear import QuantizedGradient, leading_shape, linear_backward, linear_forward
from .linear_operands import linear_operands, returned
from .linear_spec import LinearSaved, LinearSpec, backward_quantizers, cached_parts
from .norm_linear import normalized_input
from .normalization import Norm, NormStatistics
from .repetition import Repeated, Repeats, repeats_on
from .saving import arrives, backward_of, pack, restore, save, take_saved, unpack


class Ways(NamedTuple):
    """How norm(x), the activation's output and the gradient of fc1's output are made: ways of `fusions`."""

    norm: str
    activation: str
    gradient: str


@dataclass(frozen=True)
class NormMLPSpec:
    """The four steps, whether the norm's output is returned, and whether the backward recomputes the first three."""

    norm: Norm
    fc1: LinearSpec
    fc2: LinearSpec
    activation: str
    activation_params: ActivationParams
    returns_norm_output: bool = False
    recompute: bool = False
    needs_grad: bool = True
    ways: Ways | None = None
    repeats: Repeats | None = None

    def chosen(self) -> NormMLPSpec:
        """The spec with the ways that its matrices are made."""
        return replace(
            self,
            ways=Ways(
                norm_output(self.fc1, self.returns_norm_output),
                mlp_activation(self.activation, self.fc1, self.fc2),
                mlp_gradient(self.activation, self.fc1, self.fc2) if self.needs_grad else APART,
            ),
        )

    def repeating(self, device: torch.device) -> NormMLPSpec:
        """The spec of a layer whose passes may become lines."""
        fc1, fc2 = self.fc1, self.fc2
        if fc1.products is None or fc2.products is None or self.recompute or not repeats_on(device):
            return self
        # Else one is put off, or goes where no line can know.
        returned = fc1.products.grad_weight is not None and fc2.products.grad_weight is not None
        forward = Repeated(_forward_pass, device, _quantizers(self))
        of_backward = (*backward_quantizers(fc1), *backward_quantizers(fc2))
        backward = Repeated(_backward_pass, device if returned else None, of_backward)
        return replace(self, repeats=Repeats(forward, backward, 2))


class NormMLPTensors(NamedTuple):
    """x [.., H], gamma [H], beta [H], fc1 [F or 2F, H] and fc2 [H, F] with their biases, which have x's dtype."""

    x: Tensor
    gamma: Tensor
    beta: Tensor | None
    fc1_weight: Tensor
    fc1_bias: Tensor | None
    fc2_weight: Tensor
    fc2_bias: Tensor | None


class NormMLPSaved(NamedTuple):
    """What the backward reads of its forward."""

    statistics: NormStatistics
    fc1: LinearSaved
    fc1_output: Tensor
    fc2: LinearSaved


def norm_mlp(tensors: NormMLPTensors, spec: NormMLPSpec) -> tuple[Tensor, Tensor | None]:
    """(y [.., H], norm(x) or None), differentiable in every tensor."""
    if not spec.needs_grad:
        if spec.repeats is None:
            return _forward(tensors, spec)[:2]
        (y, norm_output, *_), _ = spec.repeats.forward([*tensors], spec, cached_parts(spec.fc1, spec.fc2))
        return y, norm_output
    outputs = _applied(spec, *tensors)
    return outputs if spec.returns_norm_output else (outputs, None)  # pyright: ignore[reportReturnType]


def _first_half(tensors: NormMLPTensors, spec: NormMLPSpec, keeps: bool):
    """(norm output where it is returned, its statistics, fc1's saved operands, fc1's output, the activation's output)

    keeps: a backward will read fc1's operands and output; where none will, they are None, and gone as early as can be.
    """
    norm_output, fc1_input, statistics = normalized_input(
        tensors.x.reshape(-1, tensors.x.shape[-1]),
        tensors.gamma,
        tensors.beta,
        spec.norm,
        spec.fc1,
        _ways(spec).norm,
        spec.returns_norm_output,
    )
    if _ways(spec).activation == IN_PRODUCT:
        x, w, fc1_saved = linear_operands(fc1_input, tensors.fc1_weight, spec.fc1)
        epilogue = Epilogue(spec.fc1.dtype, bias=tensors.fc1_bias, exact=spec.fc1.accumulation.forward)
        activated, fc1_output = gemm_gelu(x, w, epilogue, keeps)
        return norm_output, statistics, fc1_saved if keeps else None, fc1_output, activated
    fc1_output, fc1_saved = linear_forward(fc1_input, tensors.fc1_weight, tensors.fc1_bias, spec.fc1)
    del fc1_input
    if not keeps:
        fc1_saved = None
    activated = _activated(fc1_output, spec)
    return norm_output, statistics, fc1_saved, fc1_output if keeps else None, activated


def _activated(fc1_output: Tensor, spec: NormMLPSpec) -> Tensor | Operands:
    """The activation's output as fc2 reads it: its codes, where the activation's kernel makes them."""
    cast = (
        spec.fc2.input.cast(True, spec.fc2.needs_grad_weight) if _ways(spec).activation == IN_CODES else None
    )
    if cast is None:
        return activation_forward(spec.activation, fc1_output, spec.activation_params)
    quantized = activation_forward(spec.activation, fc1_output, spec.activation_params, cast)
    return spec.fc2.input.adopt(quantized, fc1_output.dtype)


def _fc1_gradient(
    grad_activated: Tensor, fc1_output: Tensor, spec: NormMLPSpec, bias_dtype: torch.dtype
) -> Tensor | QuantizedGradient:
    """The gradient of fc1's output, as codes where the activation's kernel makes them, its row sum included."""
    cast = None
    if _ways(spec).gradient == IN_CODES:
        cast = spec.fc1.grad_output.cast(True, spec.fc1.needs_grad_weight)
    if cast is None:
        return activation_backward(spec.activation, grad_activated, fc1_output, spec.activation_params)
    quantized, grad_bias = activation_backward(
        spec.activation,
        grad_activated,
        fc1_output,
        spec.activation_params,
        cast,
        bias_dtype if spec.fc1.needs_grad_bias else None,
    )
    return QuantizedGradient(spec.fc1.grad_output.adopt(quantized, fc1_output.dtype), grad_bias)


def _ways(spec: NormMLPSpec) -> Ways:
    assert spec.ways is not None, "a spec is used as `decided` makes it"
    return spec.ways


def _times_gelu_gradient(handed: list[Tensor], dy: Operand, w: Operand, epilogue: Epilogue) -> Tensor:
    """(dy [M, H] @ w [F, H].T) * gelu'(x [M, F]), x taken out of its list: callers hold what they call."""
    return gemm_gelu_gradient(dy, w, handed.pop(), epilogue)


def _forward(tensors: NormMLPTensors, spec: NormMLPSpec) -> tuple[Tensor, Tensor | None, NormMLPSaved | None]:
    """(y [.., H], norm(x) where it is returned, what the backward reads: None where it computes that again)"""
    x = tensors.x
    keeps = spec.needs_grad and not spec.recompute
    whole_now(x)
    norm_output, statistics, fc1_saved, fc1_output, activated = _first_half(tensors, spec, keeps)
    communicates = spec.fc1.communicates or spec.fc2.communicates
    leading = None if communicates else x.shape[:-1]
    y, fc2_saved = linear_forward(activated, tensors.fc2_weight, tensors.fc2_bias, spec.fc2, leading)
    if communicates:
        y = result_in(y, (*leading_shape(x, y), y.shape[-1]))
    if fc1_saved is None or fc1_output is None:
        return y, None if norm_output is None else result_in(norm_output, x.shape), None
    if norm_output is not None:
        norm_output, fc1_saved = returned(norm_output, x.shape, fc1_saved)
    return y, norm_output, NormMLPSaved(statistics, fc1_saved, fc1_output, fc2_saved)


class NormMLPGradients(NamedTuple):
    """One for each field of NormMLPTensors."""

    x: Tensor
    gamma: Tensor
    beta: Tensor | None
    fc1_weight: Tensor | None
    fc1_bias: Tensor | None
    fc2_weight: Tensor | None
    fc2_bias: Tensor | None


def _backward(
    grad_output: Tensor,
    grad_norm_output: Tensor | None,
    x: Tensor,
    gamma: Tensor,
    handed: list[NormMLPSaved],
    spec: NormMLPSpec,
    dtypes: tuple[torch.dtype, torch.dtype],
) -> NormMLPGradients:
    """handed: what the forward left, in a list that nothing else reads.

    It is taken out, as are the operands from lists below, because whoever holds one of these matrices [M, F] holds
    memory that the next step needs: each is gone when the step that reads it last has ended.
    """
    statistics, fc1_saved, fc1_output, fc2_saved = handed.pop()
    of_fc1, of_fc2 = list(fc1_saved), list(fc2_saved)
    del fc1_saved, fc2_saved
    arrives(fc1_output)
    if _ways(spec).gradient == IN_PRODUCT:
        product = partial(_times_gelu_gradient, [fc1_output])
        del fc1_output
        made, fc2_weight, fc2_bias = linear_backward(
            grad_output, of_fc2, spec.fc2, dtypes[1], dtypes[1], product
        )
        assert made is not None
        grad_fc1_output: list[Tensor | QuantizedGradient] = [made]
    else:
        made, fc2_weight, fc2_bias = linear_backward(grad_output, of_fc2, spec.fc2, dtypes[1], dtypes[1])
        assert made is not None
        grad_fc1_output = [_fc1_gradient(made, fc1_output, spec, dtypes[0])]
        del fc1_output
    del made
    fc1 = linear_backward(grad_fc1_output.pop(), of_fc1, spec.fc1, dtypes[0], dtypes[0])
    assert fc1.input is not None
    arrives(x, *statistics, gamma)
    flat = x.reshape(-1, x.shape[-1])
    dy = fc1.input if grad_norm_output is None else fc1.input + grad_norm_output.reshape(flat.shape)
    dx, dgamma, dbeta = spec.norm.backward(dy, flat, statistics, gamma)
    return NormMLPGradients(dx.view(x.shape), dgamma, dbeta, fc1.weight, fc1.bias, fc2_weight, fc2_bias)


def _quantizers(spec: NormMLPSpec) -> tuple[Quantizer, ...]:
    return (spec.fc1.input, spec.fc1.weight, spec.fc2.input, spec.fc2.weight)


def _replaying(spec: NormMLPSpec, states: list[Tensor]) -> NormMLPSpec:
    """The spec whose quantizers repeat the forward's quantization from what they were then, and record nothing."""
    replayed, start = [], 0
    for quantizer in _quantizers(spec):
        count = len(quantizer.replay_state())
        replayed.append(quantizer.replaying(tuple(states[start : start + count])))
        start += count
    return replace(
        spec,
        fc1=replace(spec.fc1, input=replayed[0], weight=replayed[1]),
        fc2=replace(spec.fc2, input=replayed[2], weight=replayed[3]),
    ).chosen()


def _recompute(tensors: NormMLPTensors, spec: NormMLPSpec) -> NormMLPSaved:
    """What the forward would have saved; fc2's product is not needed for it."""
    _, statistics, fc1_saved, fc1_output, activated = _first_half(tensors, spec, True)
    assert fc1_saved is not None and fc1_output is not None
    _, _, fc2_saved = linear_operands(activated, tensors.fc2_weight, spec.fc2)
    return NormMLPSaved(statistics, fc1_saved, fc1_output, fc2_saved)


def _restored(tensors: tuple[Any, ...], operands: list[Any]) -> NormMLPSaved:
    """What `_NormMLP.forward` saved beside x and gamma."""
    mean, rstdev, fc1_output = tensors
    fc1, fc2 = LinearSaved(*operands[:2]), LinearSaved(*operands[2:])
    return NormMLPSaved(NormStatistics(mean, rstdev), fc1, fc1_output, fc2)


def _forward_pass(given: list[Any], spec: NormMLPSpec) -> tuple[tuple[Any, ...], list[Any]]:
    """The fields of NormMLPTensors -> y, norm(x) and what is saved; the forms of the operands"""
    x, gamma = given[:2]
    y, norm_output, saved = _forward(NormMLPTensors(*given), spec)
    if saved is None:
        return (y, norm_output), []
    kept, forms = pack(*saved.fc1, *saved.fc2)
    return (y, norm_output, x, gamma, *saved.statistics, saved.fc1_output, *kept), forms


def _backward_pass(given: list[Any], spec: NormMLPSpec, ctx: Any) -> tuple[tuple[Any, ...], None]:
    """dy, dnorm(x) and what was saved -> gradients by the fields of NormMLPTensors"""
    grad_output, grad_norm_output, x, gamma = given[:4]
    handed = [_restored(tuple(given[4:7]), unpack(given[7:], ctx.forms))]
    given.clear()
    grad_output = grad_output.reshape(-1, grad_output.shape[-1])
    return tuple(_backward(grad_output, grad_norm_output, x, gamma, handed, spec, ctx.dtypes)), None


class _NormMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, spec, *tensors):
        ctx.spec = spec
        ctx.dtypes = (tensors[3].dtype, tensors[5].dtype)
        update = spec.fc1.scale_update
        if spec.repeats is not None:
            (y, norm_output, *kept), kind = spec.repeats.forward(
                [*tensors], spec, cached_parts(spec.fc1, spec.fc2)
            )
            spec.repeats.save(ctx, kept, kind, update)
        else:
            tensors = NormMLPTensors(*tensors)
            states = (
                [s for quantizer in _quantizers(spec) for s in quantizer.replay_state()]
                if spec.recompute
                else []
            )
            y, norm_output, saved = _forward(tensors, spec)
            if spec.recompute:
                save(ctx, (*tensors, *states), (), update)
            else:
                assert saved is not None
                kept = (tensors.x, tensors.gamma, *saved.statistics, saved.fc1_output)
                save(ctx, kept, (*saved.fc1, *saved.fc2), update)
        # torch 2.11 cannot trace the backward of an output that is None.
        return y if norm_output is None else (y, norm_output)

    @staticmethod
    @backward_of("LayerNormMLP")
    def backward(ctx, grad_output, grad_norm_output=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        spec = ctx.spec
        if spec.repeats is not None:
            dx, dgamma, dbeta, *rest = spec.repeats.backward(ctx, (grad_output, grad_norm_output), spec)
            return None, dx, dgamma, dbeta if ctx.needs_input_grad[3] else None, *rest
        if spec.recompute:
            count = len(NormMLPTensors._fields)
            kept = take_saved(ctx)
            tensors = NormMLPTensors(*kept[:count])
            x, gamma = tensors.x, tensors.gamma
            handed = [_recompute(tensors, _replaying(spec, list(kept[count:])))]
        else:
            (x, gamma, *kept), operands = restore(ctx, 5, early=True)
            handed = [_restored(tuple(kept), operands)]
            del kept, operands
        grad_output = grad_output.reshape(-1, grad_output.shape[-1])
        grads = _backward(grad_output, grad_norm_output, x, gamma, handed, spec, ctx.dtypes)
        return None, *(grads if ctx.needs_input_grad[3] else grads._replace(beta=None))


_applied = applier(_NormMLP)
