"""LayerNormLinear: y = norm(x) @ weight.T + bias; LayerNormMLP: y = act(norm(x) @ fc1.T + b1) @ fc2.T + b2.

The linear products are those of `linear.py`. The kernel of a norm, an activation or an activation's gradient can also
quantize its output (`FUSED_CAST`), and a product can compute GELU or its gradient in its epilogue (`IN_PRODUCT`).
`fusions.py` decides this when a spec is built. F is the size of the MLP; a gated activation reads 2F.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from ..offload.marks import active as offloading
from ..offload.marks import mark_ready
from ..primitives.activation import ActivationParams, activation_backward, activation_forward
from ..primitives.gemm import Epilogue, as_matrix, gemm_gelu
from ..runtime.autograd import Function
from ..tensor.storage.quantized_tensor_storage import plain_matrix
from .communication import Pending
from .fusions import (
    FUSED_CAST,
    IN_PRODUCT,
    SEPARATE,
    choose_activation_mode,
    choose_gradient_mode,
    choose_norm_mode,
)
from .gathered_operands import QuantizedGradient
from .layer import LayerFunctions, backward_results, forward_results, record, run_backward, run_without_saving
from .linear import linear_backward, linear_forward, quantize_input, quantize_weight
from .linear_operands import gradient_cast, input_cast, operand_of
from .linear_spec import Dtypes, LayerSpec, LinearSpec
from .normalization import Norm, NormStatistics
from .saving import backward_of, save, take_saved, wait_for_saved


@dataclass(frozen=True)
class NormLinearSpec(LayerSpec):
    """A norm and a linear layer.

    Attributes:
        norm: The norm.
        linear: The linear layer.
        returns_norm_output: The caller also gets norm(x).
        norm_mode: How norm(x) is quantized: FUSED_CAST by the norm's kernel, SEPARATE by the linear layer.
    """

    norm: Norm
    linear: LinearSpec
    returns_norm_output: bool = False
    norm_mode: str = SEPARATE

    def with_fusion_modes(self) -> NormLinearSpec:
        """The spec with its fusion mode."""
        return replace(self, norm_mode=choose_norm_mode(self.linear, self.returns_norm_output))

    def with_norm(self, norm: Any) -> NormLinearSpec:
        """The spec with another norm, which quantizes nothing."""
        return replace(self, norm=norm, compiled=None, norm_mode=SEPARATE)

    def linears(self) -> tuple[LinearSpec, ...]:
        return (self.linear,)


def norm_forward(
    x: Tensor, gamma: Tensor, beta: Tensor | None, norm: Norm, linear: LinearSpec, mode: str
) -> tuple[Any, NormStatistics]:
    """Compute h [M, K] = normalize(x [M, K]) * gamma [K] + beta [K].

    Returns:
        h, or its `Operands` for `linear` if the kernel of the norm quantizes it; and the statistics of the rows.
    """
    # h = (x - mean) * rstdev * gamma + beta; mean and rstdev [M] of each row. An RMSNorm has neither mean nor beta.
    if mode != FUSED_CAST:
        return norm.forward(plain_matrix(x), gamma, beta)
    cast = input_cast(linear)  # codes by rows for y and by columns for dw
    assert cast is not None
    codes, statistics = norm.forward(plain_matrix(x), gamma, beta, cast)
    return linear.input.adopt(codes, x.dtype), statistics


def norm_backward(
    dh: Tensor, grad_norm_output: Tensor | None, saved: Sequence[Any], norm: Norm
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute dx [M, K], dgamma [K] and dbeta [K] from dh [M, K].

    Args:
        dh: Gradient of h from the linear layer.
        grad_norm_output: Gradient of h where the caller has used it; None if h is not returned.
        saved: x, gamma, mean and rstdev.
        norm: The norm.
    """
    x, gamma, mean, rstdev = saved
    if offloading.used:
        wait_for_saved(x, gamma, mean, rstdev)
    if grad_norm_output is not None:
        dh = dh + grad_norm_output.reshape(dh.shape)
    # n [M, K] = (x - mean) * rstdev and g [M, K] = dh * gamma; means of each row, without mean(g) in an RMSNorm:
    # dx = rstdev * (g - mean(g) - n * mean(g * n)), dgamma [K] = sum of rows of dh * n, dbeta [K] = sum of rows of dh.
    return norm.backward(plain_matrix(dh), plain_matrix(x), NormStatistics(mean, rstdev), gamma)


def norm_linear_forward(
    tensors: Sequence[Any], spec: NormLinearSpec, saves: bool, leading: tuple[int, ...]
) -> tuple[list[Any], list[Any]]:
    """Compute y [M, N] = norm(x) [M, K] @ weight [N, K].T + bias [N].

    Args:
        tensors: x [.., K], gamma [K], beta [K], weight [N, K] and bias [N]; None for an absent one.
        spec: Settings.
        saves: Not read: the saved values are returned in either case.
        leading: Dimensions of x before K.

    Returns:
        (y, norm(x) or None); and the saved values: x, gamma, the statistics, norm(x) and the weight.
    """
    x, gamma, beta, weight, bias = tensors
    h, statistics = norm_forward(x, gamma, beta, spec.norm, spec.linear, spec.norm_mode)
    returned = h if spec.returns_norm_output else None
    # y [M, N] = h [M, K] @ weight [N, K].T + bias [N]
    y, *saved_by_linear = linear_forward(h, weight, bias, spec.linear, leading)
    saved_by_norm = [x, gamma, *statistics] if spec.linear.needs_grad_input else [None] * 4
    return [y, returned], [*saved_by_norm, *saved_by_linear]


def norm_linear_backward(
    operands: list[Any], spec: NormLinearSpec, dtypes: Dtypes, leading: tuple[int, ...]
) -> list[Any]:
    """Compute the gradients of the tensors of `norm_linear_forward`.

    Args:
        operands: dy [.., N], the gradient of the returned norm(x) or None, and the saved values. The list is emptied.
        spec: Settings.
        dtypes: Dtypes of the gradients of weight and bias.
        leading: Dimensions of x before K.
    """
    # Slices: torch 2.11 traces a starred target as a tuple, from which nothing can be deleted.
    dy, grad_norm_output = operands[:2]
    saved, linear_operands = operands[2:6], [dy, *operands[6:]]
    operands.clear()
    del dy  # dh [M, K] = dy [M, N] @ weight [N, K], dw [N, K] = dy.T @ h [M, K]
    dh, dw, db = linear_backward(linear_operands, spec.linear, *dtypes[0])
    norm_gradients = [None] * 3 if dh is None else norm_backward(dh, grad_norm_output, saved, spec.norm)
    return [*norm_gradients, dw, db]


NORM_LINEAR = LayerFunctions("LayerNormLinear", norm_linear_forward, norm_linear_backward, results=2)


def norm_linear(
    x: Tensor, gamma: Tensor, beta: Tensor | None, weight: Tensor, bias: Tensor | None, spec: NormLinearSpec
) -> tuple[Tensor, Tensor | None]:
    """Compute (y [.., N], norm(x) [.., K] or None), differentiable in every tensor."""
    if not spec.needs_grad:
        y, norm_output, *_ = run_without_saving(NORM_LINEAR, spec, (x, gamma, beta, weight, bias))
        return y, norm_output
    outputs = _NormLinear.apply(x, gamma, beta, weight, bias, spec)
    return outputs if spec.returns_norm_output else (outputs, None)  # pyright: ignore[reportReturnType]


class _NormLinear(Function):
    @staticmethod
    def forward(ctx: Any, x: Any, gamma: Any, beta: Any, weight: Any, bias: Any, spec: NormLinearSpec) -> Any:
        dtypes = (weight.dtype, weight.dtype if bias is None else bias.dtype)
        y, norm_output = record(NORM_LINEAR, ctx, spec, (x, gamma, beta, weight, bias), (dtypes,))
        # torch 2.11 cannot trace the backward of an output that is None.
        return y if norm_output is None else (y, norm_output)

    @staticmethod
    @backward_of("LayerNormLinear")
    def backward(ctx: Any, grad_output: Tensor, grad_norm_output: Tensor | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        dx, dgamma, dbeta, *rest = run_backward(NORM_LINEAR, ctx, (grad_output, grad_norm_output))
        return dx, dgamma, dbeta if ctx.needs_input_grad[2] else None, *rest, None


class FusionModes(NamedTuple):
    """How norm(x), the activation's output and the gradient of fc1's output are made: modes of `fusions`."""

    norm: str
    activation: str
    gradient: str


UNFUSED = FusionModes(SEPARATE, SEPARATE, SEPARATE)


@dataclass(frozen=True)
class NormMLPSpec(LayerSpec):
    """A norm, two linear layers, and the activation between them.

    Attributes:
        norm: The norm.
        fc1: The first linear layer.
        fc2: The second linear layer.
        activation: Name of the activation.
        activation_params: Its parameters.
        returns_norm_output: The caller also gets norm(x).
        recompute: The backward pass recomputes the results of norm, fc1 and activation that it reads.
        fusion_modes: How matrices between the steps are made.
    """

    norm: Norm
    fc1: LinearSpec
    fc2: LinearSpec
    activation: str
    activation_params: ActivationParams
    returns_norm_output: bool = False
    recompute: bool = False
    fusion_modes: FusionModes = UNFUSED

    def with_fusion_modes(self) -> NormMLPSpec:
        """The spec with its fusion modes: kernels do several steps where that pays."""
        gradient_mode = (
            choose_gradient_mode(self.activation, self.fc1, self.fc2) if self.needs_grad else SEPARATE
        )
        norm_mode = choose_norm_mode(self.fc1, self.returns_norm_output)
        activation_mode = choose_activation_mode(self.activation, self.fc1, self.fc2)
        return replace(self, fusion_modes=FusionModes(norm_mode, activation_mode, gradient_mode))

    def with_norm(self, norm: Any) -> NormMLPSpec:
        """The spec with another norm, which quantizes nothing."""
        return replace(self, norm=norm, compiled=None, fusion_modes=self.fusion_modes._replace(norm=SEPARATE))

    def linears(self) -> tuple[LinearSpec, ...]:
        return self.fc1, self.fc2


class NormMLPTensors(NamedTuple):
    """x [.., H], gamma [H], beta [H], fc1 [F or 2F, H] and fc2 [H, F] with their biases, which have x's dtype."""

    x: Tensor
    gamma: Tensor
    beta: Tensor | None
    fc1_weight: Tensor
    fc1_bias: Tensor | None
    fc2_weight: Tensor
    fc2_bias: Tensor | None


def norm_mlp_forward(
    tensors: Sequence[Any],
    spec: NormMLPSpec,
    saves: bool,
    leading: tuple[int, ...],
    compute_output: bool = True,
) -> tuple[list[Any], list[Any]]:
    """Compute y [M, H] = a [M, F] @ fc2 [H, F].T + b2 [H], a = act(u), u [M, F or 2F] = norm(x) [M, H] @ fc1.T + b1.

    Args:
        tensors: `NormMLPTensors`.
        spec: Settings.
        saves: A backward pass follows.
        leading: Dimensions of x before H.
        compute_output: Compute y. Recomputation needs the saved values only.

    Returns:
        (y, norm(x) or None); and the saved values: x, gamma, the statistics, u, and the operands of fc1
        (norm(x), weight) and of fc2 (a, weight).
    """
    x, gamma, beta, fc1_weight, fc1_bias, fc2_weight, fc2_bias = tensors
    fc1, fc2, modes = spec.fc1, spec.fc2, spec.fusion_modes
    h, statistics = norm_forward(x, gamma, beta, spec.norm, fc1, modes.norm)
    returned = h if spec.returns_norm_output else None
    if modes.activation == IN_PRODUCT:
        # One product computes u = h @ fc1.T + b1 and a = gelu(u).
        a, u, *operands = _gelu_product(h, fc1_weight, fc1_bias, fc1, saves)
        del h
    else:
        # u [M, F or 2F] = h [M, H] @ fc1 [F or 2F, H].T + b1.
        u, *operands = linear_forward(h, fc1_weight, fc1_bias, fc1, ())
        del h
        # a [M, F] = act(u), or act(u[:, :F]) * u[:, F:] of a gated activation; or codes of a from the same kernel.
        if modes.activation == FUSED_CAST:
            cast = input_cast(fc2)
            codes = activation_forward(spec.activation, as_matrix(u), spec.activation_params, cast)
            a: Any = fc2.input.adopt(codes, u.dtype)  # pyright: ignore[reportArgumentType]
            del codes
        else:
            a = activation_forward(spec.activation, u, spec.activation_params)
    saved = []
    if saves:
        if offloading.synchronizer is not None:
            mark_ready(u)
        saved = [x, gamma, *statistics, u, *operands]
    del u, operands
    # y [M, H] = a [M, F] @ fc2 [H, F].T + b2.
    y, *operands = linear_forward(a, fc2_weight, fc2_bias, fc2, leading, compute_output)
    return [y, returned], [*saved, *operands] if saves else []


def _gelu_product(
    h: Any, weight: Tensor, bias: Tensor | None, spec: LinearSpec, saves: bool
) -> tuple[Tensor, Tensor | None, Any, Any]:
    """Compute a = gelu(u), u = h @ weight.T + bias in one product.

    Returns:
        a, u if it is saved, and what the backward pass reads of h and of the weight.
    """
    h_rows, saved_input = quantize_input(h, spec)
    w_rows, saved_weight = quantize_weight(weight, spec)
    h_rows = h_rows.wait() if isinstance(h_rows, Pending) else h_rows
    epilogue = Epilogue(spec.dtype, bias=bias, exact=spec.accumulation.forward)
    # A call that may run again with gradients rounds u as that run does.
    a, u = gemm_gelu(operand_of(h_rows), operand_of(w_rows), epilogue, saves or spec.may_run_again)
    return a, u if saves else None, saved_input, saved_weight


def norm_mlp_backward(
    operands: list[Any], spec: NormMLPSpec, dtypes: Dtypes, leading: tuple[int, ...]
) -> list[Any]:
    """Compute the gradients of the tensors of `norm_mlp_forward`.

    Args:
        operands: dy [.., H], the gradient of the returned norm(x) or None, and the saved values. The list is emptied.
        spec: Settings.
        dtypes: Dtypes of the gradients of weight and bias of fc1 and of fc2.
        leading: Dimensions of x before H.
    """
    dy, grad_norm_output = operands[:2]
    saved = operands[2:6]
    u, h, fc1_weight, a, fc2_weight = operands[6:]
    operands.clear()
    # da [M, F] = dy [M, H] @ fc2 [H, F], or du = da * gelu'(u) in the same product; dfc2 [H, F] = dy.T @ a [M, F].
    fc2_operands = [dy, a, fc2_weight]
    del dy, a, fc2_weight
    if offloading.used:
        wait_for_saved(u)
    if spec.fusion_modes.gradient == IN_PRODUCT:
        fc2_operands.append(u)
        u = None
    da, dw2, db2 = linear_backward(fc2_operands, spec.fc2, *dtypes[1])
    fc1_operands = [da if u is None else _activation_gradient(da, u, spec, dtypes[0][1]), h, fc1_weight]
    del da, u, h, fc1_weight
    # dh [M, H] = du [M, F or 2F] @ fc1 [F or 2F, H]; dfc1 [F or 2F, H] = du.T @ h [M, H], db1 = sum of du's rows.
    dh, dw1, db1 = linear_backward(fc1_operands, spec.fc1, *dtypes[0])
    norm_gradients = [None] * 3 if dh is None else norm_backward(dh, grad_norm_output, saved, spec.norm)
    return [*norm_gradients, dw1, db1, dw2, db2]


def _activation_gradient(da: Tensor, u: Tensor, spec: NormMLPSpec, bias_dtype: Any) -> Any:
    """Compute du = da * act'(u), or its codes and column sums where the same kernel quantizes it."""
    fc1 = spec.fc1
    if spec.fusion_modes.gradient != FUSED_CAST:
        return activation_backward(spec.activation, da, u, spec.activation_params)
    # One kernel reads da and u, and writes the codes of du by rows for dh and by columns for dfc1, and db1 [F or 2F].
    cast = gradient_cast(fc1)
    assert cast is not None
    sums = bias_dtype if fc1.needs_grad_bias else None
    codes, db = activation_backward(spec.activation, da, u, spec.activation_params, cast, sums)
    return QuantizedGradient(fc1.grad_output.adopt(codes, u.dtype), db)


NORM_MLP = LayerFunctions("LayerNormMLP", norm_mlp_forward, norm_mlp_backward, results=2)


def norm_mlp(tensors: NormMLPTensors, spec: NormMLPSpec) -> tuple[Tensor, Tensor | None]:
    """Compute (y [.., H], norm(x) or None), differentiable in every tensor."""
    if not spec.needs_grad:
        y, norm_output, *_ = run_without_saving(NORM_MLP, spec, tensors)
        return y, norm_output
    outputs = _NormMLP.apply(spec, *tensors)
    return outputs if spec.returns_norm_output else (outputs, None)  # pyright: ignore[reportReturnType]


def _forward_quantizers(spec: NormMLPSpec) -> tuple[Any, ...]:
    return (spec.fc1.input, spec.fc1.weight, spec.fc2.input, spec.fc2.weight)


def _recompute_and_backward(ctx: Any, grads: Sequence[Tensor | None]) -> Sequence[Any]:
    """Compute the saved values again from the input, and run the backward pass on them."""
    count, kept = len(NormMLPTensors._fields), take_saved(ctx)
    # Quantizers repeat the quantization of the forward pass and record nothing.
    spec, replayed, start = ctx.spec, [], count
    for quantizer in _forward_quantizers(spec):
        end = start + len(quantizer.replay_state())
        replayed.append(quantizer.replaying(tuple(kept[start:end])))
        start = end
    fc1 = replace(spec.fc1, input=replayed[0], weight=replayed[1])
    spec = replace(
        spec, fc1=fc1, fc2=replace(spec.fc2, input=replayed[2], weight=replayed[3])
    ).with_fusion_modes()
    operands = [*grads, *norm_mlp_forward(kept[:count], spec, True, (), compute_output=False)[1]]
    del kept
    return backward_results(NORM_MLP, spec, operands, ctx.dtypes, ctx.input_shape)


class _NormMLP(Function):
    @staticmethod
    def forward(ctx: Any, spec: NormMLPSpec, *tensors: Any) -> Any:
        fc1, fc2 = tensors[3].dtype, tensors[5].dtype
        dtypes = ((fc1, fc1), (fc2, fc2))
        if spec.recompute:
            states = [state for quantizer in _forward_quantizers(spec) for state in quantizer.replay_state()]
            y, norm_output = forward_results(NORM_MLP, spec, tensors, False)[0]
            save(ctx, (*tensors, *states), (), spec.scale_update)
            ctx.spec, ctx.dtypes, ctx.input_shape = spec, dtypes, tensors[0].shape
        else:
            y, norm_output = record(NORM_MLP, ctx, spec, tensors, dtypes)
        # torch 2.11 cannot trace the backward of an output that is None.
        return y if norm_output is None else (y, norm_output)

    @staticmethod
    @backward_of("LayerNormMLP")
    def backward(ctx: Any, grad_output: Tensor, grad_norm_output: Tensor | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        grads = (grad_output, grad_norm_output)
        gradients = (
            _recompute_and_backward(ctx, grads) if ctx.spec.recompute else run_backward(NORM_MLP, ctx, grads)
        )
        dx, dgamma, dbeta, *rest = gradients
        return None, dx, dgamma, dbeta if ctx.needs_input_grad[3] else None, *rest
