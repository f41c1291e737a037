"""LayerNormMLP: y = act(norm(x) @ fc1.T + b1) @ fc2.T + b2, a norm and two linear layers in one node.

**Steps.** M is the number of rows of x [M, H], F the number of columns of the activation's output. A gated activation
has the input u [M, 2F]: a = act(u[:, :F]) * u[:, F:].

| step | forward pass | backward pass |
| --- | --- | --- |
| norm | h [M, H] = norm(x) | dx [M, H], dgamma [H] and dbeta [H] from dh |
| fc1 | u [M, F or 2F] = h @ fc1.T + b1 | dh = du @ fc1, dfc1 = du.T @ h, db1 = sum of du over M |
| activation | a [M, F] = act(u) | du = da * act'(u) |
| fc2 | y [M, H] = a @ fc2.T + b2 | da = dy @ fc2, dfc2 = dy.T @ a, db2 = sum of dy over M |

The passes of fc1 and fc2 come from `linear.py`, which explains quantization and the terms row-wise and column-wise;
the norm's come from `norm_linear.py`, which also explains the residual.

**Fusion.** A kernel can do more than one step. The kernels of the norm, of the activation and of its gradient can
quantize their results for the next product (FUSED_CAST). The product of fc1 can compute a = gelu(u) in its epilogue,
and the product for da can compute du (IN_PRODUCT). `fusions.py` chooses these modes once per call kind, with reasons.

**Columns of a.** dfc2 reads the column-wise codes of a. In the mode SAVED the forward pass saves them. In the mode
RECOMPUTED it saves u only, which the gradient of the activation needs anyway, and the kernel that computes du also
writes the columns of a (`_gradient_and_columns`).

**Recomputation.** With `checkpoint` the node saves x and the parameters. Its backward pass runs the forward function
again, with the quantizer states of the first run, and then the backward function (`_checkpointed_backward`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from ...common.formats import BLOCK_1D, E4M3
from ..offload.marks import active as offloading
from ..offload.marks import mark_ready
from ..primitives.activation import (
    ActivationParams,
    MeasuredGradient,
    OutputCast,
    activation_backward,
    activation_backward_and_output,
    activation_forward,
)
from ..primitives.gemm import Epilogue, as_matrix, gemm_gelu
from ..primitives.operand import Operand
from ..primitives.quantize import QuantizeSpec, quantize
from ..runtime.autograd import Function
from ..runtime.double_backward import once_differentiable
from . import fusions
from .communication import Pending
from .deferred_columns import save_multiplier_or_amax, with_norm_columns
from .fusions import (
    ENCODED,
    FUSED_CAST,
    IN_PRODUCT,
    SEPARATE,
    VALUES,
)
from .gathered_operands import GradientOperands
from .layer import (
    LayerFunctions,
    backward_results,
    forward_results,
    run_and_save,
    run_backward,
    run_without_saving,
)
from .linear import linear_backward, linear_forward, quantize_input, quantize_weight
from .linear_operands import gradient_cast, input_cast, to_operand
from .linear_spec import PRODUCED, RECOMPUTED, SAVED, LayerSpec, LinearSpec, replace_fields
from .norm_linear import columns_producer, norm_backward, norm_forward
from .normalization import Norm
from .saving import save_tensors, take_saved, wait_for_saved


@dataclass(frozen=True)
class NormMLPSpec(LayerSpec):
    """A norm, two linear layers, and the activation between them.

    Attributes:
        norm: The norm.
        fc1: The first linear layer.
        fc2: The second linear layer.
        activation: Activation name.
        activation_params: Its parameters.
        returns_norm_output: The layer also returns norm(x).
        width: Activation output columns.
        checkpoint: The backward pass recomputes the norm, fc1 and activation results that it reads.
        caches_quantized_input: Save fc1's output as FP8 codes where the backward pass reads them.
        norm_mode: Mode (see `fusions`) for norm(x), the input of fc1.
        activation_mode: Mode for act(u), the input of fc2; u is the output of fc1.
        gradient_mode: Mode for du, the gradient of u.
        columns_mode: Mode for the columns of act(u).
        input_mode: Mode for the saved u.
    """

    norm: Norm
    fc1: LinearSpec
    fc2: LinearSpec
    activation: str
    activation_params: ActivationParams
    width: int
    returns_norm_output: bool = False
    checkpoint: bool = False
    caches_quantized_input: bool = False
    norm_mode: Literal["fused_cast", "separate"] = SEPARATE
    activation_mode: Literal["fused_cast", "in_product", "separate"] = SEPARATE
    gradient_mode: Literal["fused_cast", "in_product", "separate"] = SEPARATE
    columns_mode: Literal["recomputed", "saved"] = SAVED
    input_mode: Literal["quantized", "values"] = VALUES

    def with_modes(self) -> NormMLPSpec:
        """Return the spec with the modes that the tables in `fusions` choose."""
        norm_mode = fusions.choose_norm_mode(self.fc1, self.returns_norm_output)
        activation_mode = fusions.choose_activation_mode(self.activation, self.fc1, self.fc2)
        recomputes = norm_mode == FUSED_CAST and self.norm.kind == "RMSNorm" and not self.checkpoint
        fc1 = with_norm_columns(self.fc1, recomputes)
        spec = replace_fields(self, fc1=fc1, norm_mode=norm_mode, activation_mode=activation_mode)
        if not self.needs_grad:
            return spec
        gradient = fusions.choose_gradient_mode(self.activation, self.fc1, self.fc2)
        columns = fusions.choose_columns_mode(
            activation_mode, gradient, self.fc1, self.fc2, self.checkpoint
        )
        saved = fusions.CachedInput(self.caches_quantized_input, columns, self.width)
        input_mode = fusions.MLP_INPUT.choose(saved)
        return replace_fields(
            spec, gradient_mode=gradient, columns_mode=columns, input_mode=input_mode
        )

    def with_patched_norm(self, norm: Any) -> NormMLPSpec:
        """Return the spec with a monkey-patched norm, whose kernel cannot quantize."""
        fc1 = replace_fields(self.fc1, input_columns=SAVED)
        return replace(self, norm=norm, fc1=fc1, compiled=None, norm_mode=SEPARATE)

    def linears(self) -> tuple[LinearSpec, ...]:
        return self.fc1, self.fc2


def norm_mlp_forward(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor | None,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc2_weight: Tensor,
    fc2_bias: Tensor | None,
    spec: NormMLPSpec,
    repeats: bool = False,
) -> tuple[Any, ...]:
    """Compute y [M, H] = a [M, F] @ fc2 [H, F].T + b2 [H], a = act(u), u [M, F or 2F] = norm(x) [M, H] @ fc1.T + b1.

    Args:
        x: Tensor [.., H].
        gamma, beta: Norm scale [H], and offset [H] or None.
        fc1_weight, fc1_bias: Weight [F or 2F, H], and bias [F or 2F] or None.
        fc2_weight, fc2_bias: Weight [H, F], and bias [H] or None. The biases have the dtype of the products.
        spec: Norm, linear layers, activation and fusion modes for this call kind.
        repeats: Compute the saved values only, in the backward pass of a layer with `spec.checkpoint`.

    Returns:
        (y or None, norm(x) or None), then the saved values (x, gamma, mean, rstdev, u, fc1 operands (norm(x), weight),
        fc2 operands (a, weight)), which the backward pass reads in this order. If it computes the columns of
        norm(x) or of a again, their multiplier or amax replaces norm(x) or a. Nothing is saved without gradients,
        or in the first run of a layer with `spec.checkpoint`.
    """
    fc1, fc2 = spec.fc1, spec.fc2
    saves = spec.needs_grad and (repeats or not spec.checkpoint)
    h, mean, rstdev, h_multiplier_or_amax = norm_forward(
        x, gamma, beta, spec.norm, fc1, spec.norm_mode
    )
    returned = h if spec.returns_norm_output else None
    if spec.activation_mode == IN_PRODUCT:
        # One product computes u = h @ fc1.T + b1 and a = gelu(u).
        a, u, *saved_by_fc1 = _gelu_product(h, fc1_weight, fc1_bias, fc1, saves)
        a_multiplier_or_amax = None
        del h
    else:
        # u [M, F or 2F] = h [M, H] @ fc1 [F or 2F, H].T + b1.
        u, *saved_by_fc1 = linear_forward(h, fc1_weight, fc1_bias, fc1)
        del h
        # a [M, F] = act(u), or act(u[:, :F]) * u[:, F:] for a gated activation; or codes of a from the same kernel.
        a, a_multiplier_or_amax = _activate(u, spec, saves)
    saved = []
    if saves:
        u = _encode_output(u) if spec.input_mode == ENCODED else u
        if offloading.synchronizer is not None:
            mark_ready(u)
        if h_multiplier_or_amax is not None:
            saved_by_fc1[0] = h_multiplier_or_amax
        saved = [x, gamma, mean, rstdev, u, *saved_by_fc1]
    del u, saved_by_fc1
    if repeats:
        y, saved_by_fc2 = None, [quantize_input(a, fc2)[1], quantize_weight(fc2_weight, fc2)[1]]
    else:
        # y [M, H] = a [M, F] @ fc2 [H, F].T + b2 [H].
        y, *saved_by_fc2 = linear_forward(a, fc2_weight, fc2_bias, fc2)
    if a_multiplier_or_amax is not None:
        saved_by_fc2[0] = a_multiplier_or_amax
    return y, returned, *([*saved, *saved_by_fc2] if saves else ())


def _activate(u: Any, spec: NormMLPSpec, saves: bool) -> tuple[Any, Tensor | None]:
    """Compute a = act(u), or its `Operands` where the same kernel quantizes it.

    Returns:
        (a; float32 [1] with which the backward pass casts the columns of a again, or None if the forward pass
        saves the columns). The number is a copy of the delayed-scaling multiplier, which changes before the
        backward pass, or max|a|.
    """
    if spec.activation_mode != FUSED_CAST:
        return activation_forward(spec.activation, u, spec.activation_params), None
    quantizer = spec.fc2.input_quantizer
    recomputes = spec.columns_mode == RECOMPUTED
    cast = quantizer.cast(rowwise=True, columnwise=False) if recomputes else input_cast(spec.fc2)
    assert cast is not None
    codes = activation_forward(spec.activation, as_matrix(u), spec.activation_params, cast)
    multiplier_or_amax = save_multiplier_or_amax(cast, codes, u) if recomputes and saves else None
    return quantizer.adopt(codes, u.dtype), multiplier_or_amax


def _encode_output(u: Any) -> Operand:
    """E4M3 codes for fc1's output [M, N] in blocks of 1 x 128, for the activation gradient."""
    codes = quantize(as_matrix(u), QuantizeSpec(BLOCK_1D, E4M3))
    assert codes.codes is not None
    return Operand(codes.codes, codes.scale, BLOCK_1D, None, u.dtype)


def _gelu_product(
    h: Any, weight: Tensor, bias: Tensor | None, spec: LinearSpec, saves: bool
) -> tuple[Tensor, Tensor | None, Any, Any]:
    """Compute a = gelu(u), u = h @ weight.T + bias in one product.

    Returns:
        (gelu(u), u or None, h operand that dw reads, weight operand that dh reads).
    """
    h_rows: Any
    h_rows, saved_input = quantize_input(h, spec)
    w_rows, saved_weight = quantize_weight(weight, spec)
    if isinstance(h_rows, Pending):
        h_rows = h_rows.wait()
    epilogue = Epilogue(spec.dtype, bias=bias, exact=spec.accumulation.forward)
    # Checkpointing may repeat this call with gradients. Both runs must round u alike, so u is written in both.
    rows: Any = to_operand(h_rows)
    a, u = gemm_gelu(rows, to_operand(w_rows), epilogue, keeps_input=saves or spec.may_run_again)
    return a, u if saves else None, saved_input, saved_weight


def norm_mlp_backward(operands: list[Any], spec: NormMLPSpec) -> list[Any]:
    """Compute the gradients for the tensors in `norm_mlp_forward`.

    Args:
        operands: dy [.., H], the gradient of the returned norm(x) or None, the gradient of the residual or
            None, and the saved values. The list is emptied.
        spec: Norm, linear layers, activation and fusion modes for this call kind.
    """
    dy, grad_norm_output, grad_residual, x, gamma, mean, rstdev = operands[:7]
    u, saved_h, fc1_weight, saved_a, fc2_weight = operands[7:]
    operands.clear()
    saved_by_norm = (x, gamma, mean, rstdev)
    fc2_operands = [dy, saved_a, fc2_weight]
    del dy, fc2_weight
    if offloading.used:
        wait_for_saved(u)
    produce_a = None
    if spec.gradient_mode == IN_PRODUCT:  # du = da * gelu'(u) in the epilogue of the product
        fc2_operands.append(u)
    elif spec.columns_mode == RECOMPUTED:
        # one kernel computes du and the columns of a, before dfc2
        produce_a = _gradient_and_columns(u, saved_a, spec)
    fc2_returns_du = spec.gradient_mode == IN_PRODUCT or spec.columns_mode == RECOMPUTED
    if fc2_returns_du:
        u = None  # `fc2_operands` or `produce_a` has the last reference
    del saved_a
    # da [M, F] = dy [M, H] @ fc2 [H, F], or du; dfc2 [H, F] = dy.T @ a [M, F], db2 [H] = sum of dy over M.
    da_or_du, dw2, db2 = linear_backward(fc2_operands, spec.fc2, produce_input=produce_a)
    del produce_a
    if isinstance(da_or_du, MeasuredGradient):
        da_or_du = _quantized_gradient(da_or_du, spec.fc1)
    # du [M, F or 2F] = da * act'(u)
    du = da_or_du if fc2_returns_du else _activation_gradient(da_or_du, u, spec)
    fc1_operands = [du, saved_h, fc1_weight]
    del da_or_du, du, u, saved_h, fc1_weight
    # dh [M, H] = du [M, F or 2F] @ fc1 [F or 2F, H]; dfc1 [F or 2F, H] = du.T @ h [M, H], db1 = sum of du over M.
    produce_h = (
        columns_producer(x, gamma, fc1_operands[1], spec.norm, spec.fc1)
        if spec.fc1.input_columns == PRODUCED  # the saved value is the multiplier or amax of h
        else None
    )
    dh, dw1, db1 = linear_backward(fc1_operands, spec.fc1, produce_input=produce_h)
    if dh is None:
        return [None, None, None, dw1, db1, dw2, db2]
    return [
        *norm_backward(dh, grad_norm_output, grad_residual, saved_by_norm, spec.norm),
        dw1,
        db1,
        dw2,
        db2,
    ]


def _activation_gradient(da: Tensor, u: Any, spec: NormMLPSpec) -> Any:
    """Compute du = da * act'(u), or its codes and db1 [F or 2F] where the same kernel quantizes it."""
    fc1 = spec.fc1
    if spec.gradient_mode != FUSED_CAST:
        return activation_backward(spec.activation, da, u, spec.activation_params)
    # One kernel reads da and u, and writes row-wise codes of du for dh, column-wise codes for dfc1, and db1.
    cast = gradient_cast(fc1)
    assert cast is not None
    sums = (fc1.grad_bias_dtype or fc1.dtype) if fc1.needs_grad_bias else None
    codes, db = activation_backward(spec.activation, da, u, spec.activation_params, cast, sums)
    return GradientOperands(fc1.grad_output_quantizer.adopt(codes, u.dtype), db)


def _gradient_and_columns(
    u: Tensor | Operand, multiplier_or_amax: Tensor, spec: NormMLPSpec
) -> Callable[[Any], tuple[Any, Any]]:
    """Return the function da -> (du = da * act'(u) with its maximum or its codes, columns of a = act(u)).

    Args:
        u: fc1 output, or its codes.
        multiplier_or_amax: Saved for the columns of a; see `_activate`.
        spec: Settings.
    """
    fc1, quantizer = spec.fc1, spec.fc2.input_quantizer
    cast = gradient_cast(fc1) if spec.gradient_mode == FUSED_CAST else None
    if cast is not None and cast.multiplier is None:
        cast = None  # du is cast by its maximum, which the kernel computes too
    columns = quantizer.cast(rowwise=False, columnwise=True)
    assert columns is not None
    has_multiplier = columns.multiplier is not None
    output = OutputCast(
        columns.spec,
        multiplier_or_amax if has_multiplier else None,
        None if has_multiplier else multiplier_or_amax,
    )

    def produce(da: Any) -> tuple[Any, Any]:
        du, codes = activation_backward_and_output(
            spec.activation, da, u, spec.activation_params, cast, output
        )
        a = quantizer.adopt(codes, u.dtype).columnwise
        if isinstance(du, MeasuredGradient):
            return du, a
        return GradientOperands(fc1.grad_output_quantizer.adopt(du, u.dtype), None), a

    return produce


def _quantized_gradient(du: MeasuredGradient, fc1: LinearSpec) -> Any:
    """Quantize du [M, N] with one scale from its maximum; return its values where fc1 quantizes it in another way.

    A `MeasuredGradient` contains the values of du and their maximum.
    """
    cast = None if fc1.needs_grad_bias else gradient_cast(fc1)
    if cast is None or not fusions.has_one_scale(cast):
        return du.values
    codes = quantize(du.values, cast.spec, amax=du.amax)
    return GradientOperands(fc1.grad_output_quantizer.adopt(codes, du.values.dtype), None)


_NUM_TENSORS = 7  # tensors that `norm_mlp_forward` reads
NORM_MLP_FUNCTIONS = LayerFunctions(
    "LayerNormMLP", norm_mlp_forward, norm_mlp_backward, num_results=2, num_gradients=3
)


def norm_mlp(
    tensors: tuple[Tensor | None, ...], spec: NormMLPSpec, returns_residual: bool = False
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute y [.., H], differentiable in every tensor.

    Args:
        tensors: The tensors that `norm_mlp_forward` reads, in its order.
        spec: Settings for this call kind.
        returns_residual: See `norm_linear`.

    Returns:
        (y; norm(x) with `spec.returns_norm_output`, otherwise None; x with `returns_residual`, otherwise None).
    """
    if not spec.needs_grad:
        y, h = run_without_saving(NORM_MLP_FUNCTIONS, spec, tensors)
        return y, h, None
    outputs = _NormMLP.apply(spec, returns_residual, *tensors)
    if returns_residual:
        return outputs[0], None, outputs[1]
    return (*outputs, None) if spec.returns_norm_output else (outputs, None, None)


def _forward_quantizers(spec: NormMLPSpec) -> tuple[Any, ...]:
    return (
        spec.fc1.input_quantizer,
        spec.fc1.weight_quantizer,
        spec.fc2.input_quantizer,
        spec.fc2.weight_quantizer,
    )


def _checkpointed_backward(
    functions: LayerFunctions, ctx: Any, grads: Sequence[Tensor | None]
) -> Sequence[Any]:
    """Do `run_backward` with saved values that are computed again from the input."""
    saved = take_saved(ctx)
    inputs, states = saved[:_NUM_TENSORS], saved[_NUM_TENSORS:]
    del saved
    # These quantizers use the scales of the first run and record no maxima.
    repeated: list[Any] = []
    for quantizer in _forward_quantizers(ctx.spec):
        size = len(quantizer.replay_state())
        repeated.append(quantizer.replaying(tuple(states[:size])))
        states = states[size:]
    fc1_input, fc1_weight, fc2_input, fc2_weight = repeated
    fc1 = replace(ctx.spec.fc1, input_quantizer=fc1_input, weight_quantizer=fc1_weight)
    fc2 = replace(ctx.spec.fc2, input_quantizer=fc2_input, weight_quantizer=fc2_weight)
    # Whether a kernel can cast depends on the quantizers, so the modes are chosen again.
    spec = replace(ctx.spec, fc1=fc1, fc2=fc2).with_modes()
    operands = [
        *grads,
        *norm_mlp_forward(*inputs, spec=spec, repeats=True)[functions.num_results :],
    ]
    del inputs
    gradients = backward_results(functions, spec, operands, ctx.input_shape)
    if spec.scale_update is not None:
        spec.scale_update.run()
    return gradients


def _run_and_save(ctx: Any, spec: NormMLPSpec, tensors: Sequence[Any]) -> Sequence[Any]:
    """Run the forward pass of a node and save the operands for its backward pass.

    With `checkpoint`, save the tensors and the quantizers' states instead, from which
    `_checkpointed_backward` computes the operands again.
    """
    if not spec.checkpoint:
        return run_and_save(NORM_MLP_FUNCTIONS, ctx, spec, tensors)
    states = [
        state for quantizer in _forward_quantizers(spec) for state in quantizer.replay_state()
    ]
    results = forward_results(NORM_MLP_FUNCTIONS, spec, tensors)[0]
    save_tensors(ctx, (*tensors, *states))
    ctx.spec, ctx.input_shape = spec, tensors[0].shape
    return results


class _NormMLP(Function):
    """Node in autograd's graph: returns y, (y, norm(x)) with `spec.returns_norm_output`, or (y, x) with a residual."""

    @staticmethod
    def forward(ctx: Any, spec: NormMLPSpec, returns_residual: bool, *tensors: Any) -> Any:
        y, norm_output = _run_and_save(ctx, spec, tensors)
        ctx.returns_residual = returns_residual
        second = tensors[0] if returns_residual else norm_output
        # torch 2.11 cannot trace the backward for an output that is None.
        return y if second is None else (y, second)

    @staticmethod
    @once_differentiable("LayerNormMLP")
    def backward(ctx: Any, grad_output: Tensor, grad_second: Tensor | None = None) -> Any:
        run = _checkpointed_backward if ctx.spec.checkpoint else run_backward
        seconds = (None, grad_second) if ctx.returns_residual else (grad_second, None)
        dx, dgamma, dbeta, *others = run(NORM_MLP_FUNCTIONS, ctx, (grad_output, *seconds))
        # An RMSNorm has no beta; spec and returns_residual have no gradients.
        return None, None, dx, dgamma, dbeta if ctx.needs_input_grad[4] else None, *others
