"""y [M, N] = norm(x [M, K]) @ w [N, K].T + b: the norm's functions followed by the linear layer's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..offload.marks import whole_now
from ..primitives.gemm import as_matrix
from ..runtime.applying import applier
from ..runtime.tracing import result_in
from ..tensor.quantizer import Operands
from .fusions import APART, IN_CODES, norm_output
from .linear import leading_shape, linear_backward, linear_forward
from .linear_operands import returned
from .linear_spec import LinearSaved, LinearSpec, backward_quantizers, cached_parts
from .normalization import Norm, NormStatistics
from .repetition import Repeated, Repeats, repeats_on
from .saving import arrives, backward_of, pack, restore, save, unpack


@dataclass(frozen=True)
class NormLinearSpec:
    """A norm, a linear layer, and whether the caller also gets the norm's output."""

    norm: Norm
    linear: LinearSpec
    returns_norm_output: bool = False
    needs_grad: bool = True
    way: str = APART
    repeats: Repeats | None = None

    def chosen(self) -> NormLinearSpec:
        """The spec with the way that norm(x) is made, of `fusions`."""
        return replace(self, way=norm_output(self.linear, self.returns_norm_output))

    def repeating(self, device: torch.device) -> NormLinearSpec:
        """The spec of a layer whose passes may become lines."""
        linear = self.linear
        if linear.products is None or linear.output is not None or not repeats_on(device):
            return self
        returned = (
            linear.products.grad_weight is not None
        )  # else it is put off, or goes where no line can know
        forward = Repeated(_forward_pass, device, (linear.input, linear.weight))
        backward = Repeated(_backward_pass, device if returned else None, backward_quantizers(linear))
        return replace(self, repeats=Repeats(forward, backward, 2))


def norm_linear(
    x: Tensor, gamma: Tensor, beta: Tensor | None, weight: Tensor, bias: Tensor | None, spec: NormLinearSpec
) -> tuple[Tensor, Tensor | None]:
    """(y [.., N], norm(x) [.., K] or None), differentiable in every tensor."""
    if not spec.needs_grad:
        if spec.repeats is None:
            return _forward(x, gamma, beta, weight, bias, spec)[:2]
        given = [x, gamma, beta, weight, bias]
        (y, norm_output, *_), _ = spec.repeats.forward(given, spec, cached_parts(spec.linear))
        return y, norm_output
    outputs = _applied(x, gamma, beta, weight, bias, spec)
    return outputs if spec.returns_norm_output else (outputs, None)  # pyright: ignore[reportReturnType]


def _forward(
    x: Tensor, gamma: Tensor, beta: Tensor | None, weight: Tensor, bias: Tensor | None, spec: NormLinearSpec
) -> tuple[Tensor, Tensor | None, NormStatistics, LinearSaved]:
    whole_now(x)
    flat = as_matrix(x)
    norm_output, linear_input, statistics = normalized_input(
        flat, gamma, beta, spec.norm, spec.linear, spec.way, spec.returns_norm_output
    )
    if spec.linear.communicates:
        y, saved = linear_forward(linear_input, weight, bias, spec.linear)
        y = result_in(y, (*leading_shape(x, y), y.shape[-1]))
    else:
        y, saved = linear_forward(linear_input, weight, bias, spec.linear, x.shape[:-1])
    if spec.linear.output is not None:
        y = spec.linear.output.quantize(y)
    if norm_output is not None:
        norm_output, saved = returned(norm_output, x.shape, saved)
    return y, norm_output, statistics, saved  # pyright: ignore[reportReturnType]


def normalized_input(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor | None,
    norm: Norm,
    linear: LinearSpec,
    way: str,
    wanted: bool,
) -> tuple[Tensor | None, Tensor | Operands, NormStatistics]:
    """(norm(x) where it is wanted, what the linear layer reads of it, statistics)

    way   IN_CODES: the norm's kernel makes the codes alone, where norm(x) is not wanted
    """
    cast = linear.input.cast(True, linear.needs_grad_weight) if way == IN_CODES else None
    if cast is None:
        norm_output, statistics = norm.forward(x, gamma, beta)
        return norm_output if wanted else None, norm_output, statistics
    quantized, statistics = norm.forward(x, gamma, beta, cast)
    return None, linear.input.adopt(quantized, x.dtype), statistics


def _forward_pass(given: list[Any], spec: NormLinearSpec) -> tuple[tuple[Any, ...], list[Any]]:
    """x, gamma, beta, weight, bias -> y, norm(x) and what is saved; the forms of the operands"""
    x, gamma, beta, weight, bias = given
    y, norm_output, statistics, saved = _forward(x, gamma, beta, weight, bias, spec)
    kept, forms = pack(*saved)
    return (y, norm_output, x, gamma, *statistics, *kept), forms


def _backward_pass(given: list[Any], spec: NormLinearSpec, ctx: Any) -> tuple[tuple[Any, ...], None]:
    """dy, dnorm(x) and what was saved -> gradients, as `_NormLinear.forward` takes tensors"""
    grad_output, grad_norm_output, *kept = given[:6]
    operands = unpack(given[6:], ctx.forms)
    given.clear()
    return _gradients(grad_output, grad_norm_output, tuple(kept), operands, spec, ctx), None


def _gradients(
    grad_output: Tensor,
    grad_norm_output: Tensor | None,
    kept: tuple[Any, ...],
    saved: list[Any],
    spec: NormLinearSpec,
    ctx: Any,
) -> tuple[Any, ...]:
    """Of x, gamma, beta, weight and bias, as the node answers them.

    The operands are handed over, not lent: norm(x) is gone when the norm's backward allocates.
    """
    x, gamma, mean, rstdev = kept
    flat = as_matrix(x)
    leading = flat.shape[:1] if spec.linear.products is not None and spec.linear.plain else None
    if leading is None:
        grad_output = as_matrix(grad_output)
    dtypes = ctx.weight_dtype, ctx.bias_dtype
    grads = linear_backward(grad_output, saved, spec.linear, *dtypes, leading=leading)
    dy = grads.input
    if grad_norm_output is not None:
        of_norm_output = grad_norm_output.reshape(flat.shape)
        dy = of_norm_output if dy is None else dy + of_norm_output
    if dy is None:  # nothing before the linear layer is trained
        return None, None, None, grads.weight, grads.bias
    arrives(x, mean, rstdev, gamma)
    dx, dgamma, dbeta = spec.norm.backward(dy, flat, NormStatistics(mean, rstdev), gamma)
    dbeta = dbeta if ctx.needs_input_grad[2] else None
    return dx.view(x.shape), dgamma, dbeta, grads.weight, grads.bias


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gamma, beta, weight, bias, spec):
        if spec.repeats is None:
            y, norm_output, statistics, saved = _forward(x, gamma, beta, weight, bias, spec)
            save(ctx, (x, gamma, statistics.mean, statistics.rstdev), saved, spec.linear.scale_update)
        else:
            given = [x, gamma, beta, weight, bias]
            (y, norm_output, *kept), kind = spec.repeats.forward(given, spec, cached_parts(spec.linear))
            spec.repeats.save(ctx, kept, kind, spec.linear.scale_update)
        ctx.spec = spec
        ctx.weight_dtype, ctx.bias_dtype = weight.dtype, weight.dtype if bias is None else bias.dtype
        # torch 2.11 cannot trace the backward of an output that is None.
        return y if norm_output is None else (y, norm_output)

    @staticmethod
    @backward_of("LayerNormLinear")
    def backward(ctx, grad_output, grad_norm_output=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        spec = ctx.spec
        if spec.repeats is None:
            kept, saved = restore(ctx, 4, early=True)
            return *_gradients(grad_output, grad_norm_output, kept, saved, spec, ctx), None
        return *spec.repeats.backward(ctx, (grad_output, grad_norm_output), spec), None


_applied = applier(_NormLinear)
