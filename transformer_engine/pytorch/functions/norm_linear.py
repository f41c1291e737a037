"""y [.., N] = norm(x [.., K]) @ weight [N, K].T + bias [N]: a LayerNorm or RMSNorm and a linear layer in one node.

Read `linear.py` first: it explains quantization and the terms row-wise, column-wise and `Operands`. Then read
`norm_linear_forward` and `norm_linear_backward`. The next file is `norm_mlp.py`, which adds a second linear layer.

**Norm.** h = norm(x) is the input of the linear layer. A norm normalizes each row of x [M, K], then scales each column
by gamma [K]:

| norm | h [M, K] | rstdev [M], of each row |
| --- | --- | --- |
| LayerNorm | (x - mean) * rstdev * gamma + beta | 1 / sqrt(mean((x - mean)^2) + eps) |
| RMSNorm | x * rstdev * gamma | 1 / sqrt(mean(x^2) + eps) |

The statistics are float32 and are saved for the backward pass. With `zero_centered`, gamma is stored minus one.

**Passes.** The forward pass computes h (`norm_forward`), then y = h @ weight.T + bias (`linear_forward`). The backward
pass computes dh, the gradient with respect to h (`linear_backward`), then dx from dh (`norm_backward`).

**Fusion.** Under a recipe the products read FP8 codes of h. In the mode FUSED_CAST the norm kernel
writes these codes and no h in high precision: M * K values are neither written nor read. In the
mode SEPARATE the norm writes h, and the linear layer quantizes it. `fusions.choose_norm_mode` chooses the mode once
per call kind: FUSED_CAST if the linear layer's quantizer can run in the norm's kernel (`input_cast` in
`linear_operands.py` lists the conditions) and the caller does not receive h, unless `te.use_backend` forces SEPARATE.
`te.explain` prints the reason.

**Columns of h.** dw reads the column-wise codes of h, which the forward pass saves by default. With
`use_backend(norm_columns="recomputed")`, which an RMSNorm in the mode FUSED_CAST supports in an unsharded layer with
per-tensor scaling, the forward pass saves only the multiplier or amax of h, and `linear.input_columns` is PRODUCED.
The backward pass then normalizes x again and casts h with the saved number (`columns_producer`).

**Residual.** In a transformer layer x is also the residual. With `returns_residual` the node returns x as a
second output, so that the residual's gradient arrives in the same node, and the norm's backward kernel adds it to
dx. The methods `forward_with_residual` of `te.LayerNormLinear` and `te.LayerNormMLP` decide this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from ..offload.marks import active as offloading
from ..primitives.gemm import as_matrix
from ..runtime.autograd import Function
from ..runtime.double_backward import once_differentiable
from . import fusions
from .deferred_columns import cast_columns, save_multiplier_or_amax, with_norm_columns
from .fusions import FUSED_CAST, SEPARATE
from .layer import LayerFunctions, run_and_save, run_backward, run_without_saving
from .linear import linear_backward, linear_forward
from .linear_operands import dense_values, input_cast
from .linear_spec import PRODUCED, SAVED, LayerSpec, LinearSpec, replace_fields
from .normalization import Norm
from .saving import DeferredColumns, wait_for_saved


@dataclass(frozen=True)
class NormLinearSpec(LayerSpec):
    """Settings for one call kind of a norm and a linear layer.

    Attributes:
        norm: The norm: its kind, its constants and the functions that compute it.
        linear: Linear layer settings. `linear.needs_grad_input` means that dh is needed, because x, gamma or beta
            requires a gradient.
        returns_norm_output: The layer also returns h = norm(x).
        norm_mode: FUSED_CAST or SEPARATE: which kernel quantizes h.
    """

    norm: Norm
    linear: LinearSpec
    returns_norm_output: bool = False
    norm_mode: Literal["fused_cast", "separate"] = SEPARATE

    def with_modes(self) -> NormLinearSpec:
        """Choose `norm_mode` and `linear.input_columns`, the mode of the columns of h.

        The choices are tables in `fusions` and `deferred_columns`.
        """
        mode = fusions.choose_norm_mode(self.linear, self.returns_norm_output)
        # Only an RMSNorm whose kernel quantizes h is computed again.
        linear = with_norm_columns(self.linear, mode == FUSED_CAST and self.norm.kind == "RMSNorm")
        return replace(self, linear=linear, norm_mode=mode)

    def with_patched_norm(self, norm: Any) -> NormLinearSpec:
        """Return the spec with a monkey-patched norm (`NormByName`), which cannot quantize and runs in every call."""
        linear = replace_fields(self.linear, input_columns=SAVED)
        return replace(self, norm=norm, linear=linear, compiled=None, norm_mode=SEPARATE)

    def linears(self) -> tuple[LinearSpec, ...]:
        return (self.linear,)


def norm_linear(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    spec: NormLinearSpec,
    returns_residual: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute y [.., N], differentiable in every tensor.

    Returns:
        (y; h = norm(x) [.., K] with `spec.returns_norm_output`, otherwise None; x [.., K] with `returns_residual`,
        otherwise None). `norm_backward` adds the gradient of the returned x to dx. The sum is bit-equal to autograd's
        sum of the two gradients. `returns_residual` requires that x needs a gradient and that the spec does not return
        h (`residual_unsupported_reason`).
    """
    if not spec.needs_grad:
        y, h = run_without_saving(NORM_LINEAR_FUNCTIONS, spec, (x, gamma, beta, weight, bias))
        return y, h, None
    outputs = _NormLinear.apply(x, gamma, beta, weight, bias, spec, returns_residual)
    if returns_residual:
        return outputs[0], None, outputs[1]
    return (*outputs, None) if spec.returns_norm_output else (outputs, None, None)


class _NormLinear(Function):
    """Node in autograd's graph: returns y, (y, norm(x)) with `spec.returns_norm_output`, or (y, x) with a residual."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gamma: Tensor,
        beta: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        spec: NormLinearSpec,
        returns_residual: bool,
    ) -> Any:
        y, norm_output = run_and_save(
            NORM_LINEAR_FUNCTIONS, ctx, spec, (x, gamma, beta, weight, bias)
        )
        ctx.returns_residual = returns_residual
        second = x if returns_residual else norm_output
        # torch 2.11 cannot trace the backward for an output that is None.
        return y if second is None else (y, second)

    @staticmethod
    @once_differentiable("LayerNormLinear")
    def backward(ctx: Any, grad_output: Tensor, grad_second: Tensor | None = None) -> Any:
        seconds = (None, grad_second) if ctx.returns_residual else (grad_second, None)
        dx, dgamma, dbeta, dw, db = run_backward(
            NORM_LINEAR_FUNCTIONS, ctx, (grad_output, *seconds)
        )
        # An RMSNorm has no beta; spec and returns_residual have no gradients.
        return dx, dgamma, dbeta if ctx.needs_input_grad[2] else None, dw, db, None, None


def norm_linear_forward(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    spec: NormLinearSpec,
) -> tuple[Any, ...]:
    """Compute y [M, N] = norm(x) [M, K] @ weight [N, K].T + bias [N].

    Args:
        x: Tensor [.., K].
        gamma: Norm scale [K].
        beta: Norm offset [K], or None.
        weight: Weight [N, K] on this rank.
        bias: Bias [N], or None.
        spec: Norm, linear layer and fusion mode for this call kind.

    Returns:
        (y, h or None), then the saved values (x, gamma, mean, rstdev, h for dw, weight for dh),
        which `norm_linear_backward` reads in this order; None for one that no gradient needs. If the backward pass
        produces the columns of h (PRODUCED), their multiplier or amax replaces h. With sequence parallelism h has
        the rows on this rank; the module gathers them if requested (`ProductsModule.pack_outputs`).
    """
    # h [M, K] = norm(x [M, K])
    h, mean, rstdev, multiplier_or_amax = norm_forward(
        x, gamma, beta, spec.norm, spec.linear, spec.norm_mode
    )
    # y [M, N] = h [M, K] @ weight [N, K].T + bias [N]
    y, saved_h, saved_weight = linear_forward(h, weight, bias, spec.linear)
    if multiplier_or_amax is not None:
        saved_h = multiplier_or_amax
    saved_by_norm = [x, gamma, mean, rstdev] if spec.linear.needs_grad_input else [None] * 4
    return y, h if spec.returns_norm_output else None, *saved_by_norm, saved_h, saved_weight


def norm_forward(
    x: Tensor, gamma: Tensor, beta: Tensor | None, norm: Norm, linear: LinearSpec, mode: str
) -> tuple[Any, Tensor | None, Tensor, Tensor | None]:
    """Compute h [M, K] = normalize(x [M, K]) * gamma [K] + beta [K].

    Args:
        x: Tensor [.., K]; a quantized tensor is dequantized.
        gamma: Scale per column.
        beta: Offset per column; None for an RMSNorm.
        norm: Norm kind and constants.
        linear: Settings for the linear layer that reads h, whose quantizer the kernel applies in the mode FUSED_CAST.
        mode: FUSED_CAST or SEPARATE.

    Returns:
        (h, or its quantized `Operands` in the mode FUSED_CAST; mean per row or None; rstdev per row; the multiplier
        or amax, float32 [1], with which the backward pass casts the columns of h if it produces them (PRODUCED),
        otherwise None).
    """
    x = as_matrix(dense_values(x))
    if mode != FUSED_CAST:
        return *norm.forward(x, gamma, beta), None
    is_produced_again = linear.input_columns == PRODUCED
    # The cast describes row-wise codes, which y reads, and column-wise codes if they are saved for dw.
    cast = linear.input_quantizer.cast(True, False) if is_produced_again else input_cast(linear)
    assert cast is not None  # `choose_norm_mode` returns FUSED_CAST only for layers with a cast
    codes, mean, rstdev = norm.forward(x, gamma, beta, cast)
    multiplier_or_amax = save_multiplier_or_amax(cast, codes, x) if is_produced_again else None
    return linear.input_quantizer.adopt(codes, x.dtype), mean, rstdev, multiplier_or_amax


def norm_linear_backward(operands: list[Any], spec: NormLinearSpec) -> list[Any]:
    """Compute the gradients of x, gamma, beta, weight and bias.

    Args:
        operands: dy [.., N], the gradient of the returned h or None, the gradient of the residual or None,
            and the saved values. The list is emptied, so that `linear_backward` frees the operands h and
            weight after their last reader.
        spec: Norm, linear layer and fusion mode for this call kind.
    """
    dy, grad_norm_output, grad_residual, x, gamma, mean, rstdev, saved_h, weight = operands
    operands.clear()
    linear_operands = [dy, saved_h, weight]
    saved_by_norm = x, gamma, mean, rstdev
    produce_input = None
    if spec.linear.input_columns == PRODUCED:  # saved_h is the multiplier or amax of h
        produce_input = columns_producer(x, gamma, saved_h, spec.norm, spec.linear)
    del dy, saved_h, weight
    # dh [M, K] = dy [M, N] @ weight [N, K], dw [N, K] = dy.T @ h [M, K], db [N] = sum of dy over M
    dh, dw, db = linear_backward(linear_operands, spec.linear, produce_input=produce_input)
    if dh is None:  # neither x nor the norm's parameters need a gradient
        return [None, None, None, dw, db]
    # dx [M, K], dgamma [K], dbeta [K] from dh [M, K]
    return [*norm_backward(dh, grad_norm_output, grad_residual, saved_by_norm, spec.norm), dw, db]


def norm_backward(
    dh: Tensor,
    grad_norm_output: Tensor | None,
    grad_residual: Tensor | None,
    saved: Sequence[Any],
    norm: Norm,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute dx [M, K], dgamma [K] and dbeta [K] from dh [M, K].

    With n = (x - mean) * rstdev, the normalized rows, and g = dh * gamma (dh * (1 + gamma) with `zero_centered`), a
    LayerNorm has the gradients

        dx = rstdev * (g - mean(g) - n * mean(g * n)), means over each row
        dgamma = sum(dh * n), dbeta = sum(dh), sums over the M rows

    An RMSNorm has neither mean nor beta: n = x * rstdev and dx = rstdev * (g - n * mean(g * n)).

    Args:
        dh: Gradient of h from the linear layer.
        grad_norm_output: Gradient of h from the caller that received it, or None.
        grad_residual: Gradient of the residual, the second use of x [.., K]. It is added to dx after dx is rounded
            to x's dtype. None without a residual.
        saved: x [.., K], gamma [K], mean [M] (None for an RMSNorm) and rstdev [M].
        norm: Norm kind and constants.
    """
    x, gamma, mean, rstdev = saved
    if offloading.used:
        wait_for_saved(x, gamma, mean, rstdev)
    if grad_norm_output is not None:
        dh = dh + grad_norm_output.reshape(dh.shape)
    x = as_matrix(dense_values(x))
    if grad_residual is None:
        return norm.backward(dh, x, mean, rstdev, gamma)
    # The kernel rounds dx before it adds: bit-equal to autograd, which adds two rounded gradients.
    return norm.backward(
        dh, x, mean, rstdev, gamma, add=as_matrix(grad_residual), rounds_first=True
    )


def columns_producer(
    x: Tensor, gamma: Tensor, multiplier_or_amax: Tensor, norm: Norm, linear: LinearSpec
) -> Callable[[Any], tuple[Any, Any]]:
    """Return the function dh -> (dh, column-wise h [K, M]), which computes the output h [M, K] of an RMSNorm again.

    `linear_backward` calls it as `produce_input`.

    Args:
        x: The saved input [.., K]; its statistics are computed again.
        gamma: The saved scale [K].
        multiplier_or_amax: Float32 [1] with which the forward pass cast h (`save_multiplier_or_amax`).
        norm: The norm.
        linear: Linear layer settings.
    """

    def produce(dh: Any) -> tuple[Any, Any]:
        if offloading.used:
            wait_for_saved(x, gamma)
        h, _, _ = norm.forward(as_matrix(dense_values(x)), gamma, None)
        return dh, cast_columns(DeferredColumns(h, multiplier_or_amax), linear.input_quantizer)

    return produce


NORM_LINEAR_FUNCTIONS = LayerFunctions(
    "LayerNormLinear", norm_linear_forward, norm_linear_backward, num_results=2, num_gradients=3
)
