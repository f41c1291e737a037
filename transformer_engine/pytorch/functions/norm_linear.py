"""LayerNormLinear: y = norm(x) @ weight.T + bias.

The linear product is that of `linear.py`. The kernel of the norm can quantize its result (`FUSED_CAST`). `fusions.py`
decides this when a spec is built; the functions here read the decision from the spec.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ..offload.marks import active as offloading
from ..primitives.gemm import as_matrix
from ..runtime.autograd import Function
from . import fusions
from .fusions import FUSED_CAST, SEPARATE
from .layer import LayerFunctions, record, run_backward, run_without_saving
from .linear import linear_backward, linear_forward
from .linear_operands import dense_values, input_cast
from .linear_spec import Dtypes, LayerSpec, LinearSpec
from .normalization import Norm, NormStatistics
from .saving import backward_of, wait_for_saved


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
        """Return the spec with the mode that the table of `fusions` chooses."""
        return replace(self, norm_mode=fusions.choose_norm_mode(self.linear, self.returns_norm_output))

    def with_norm(self, norm: Any) -> NormLinearSpec:
        """Return the spec with a monkey-patched norm, whose kernel cannot quantize."""
        return replace(self, norm=norm, compiled=None, norm_mode=SEPARATE)

    def linears(self) -> tuple[LinearSpec, ...]:
        return (self.linear,)


def norm_forward(
    x: Tensor, gamma: Tensor, beta: Tensor | None, norm: Norm, linear: LinearSpec, mode: str
) -> tuple[Any, NormStatistics]:
    """Compute h [M, K] = normalize(x [M, K]) * gamma [K] + beta [K].

    Returns:
        (h, or its quantized `Operands` if mode is FUSED_CAST; mean and rstdev of each row).
    """
    # h = (x - mean) * rstdev * gamma + beta; mean and rstdev [M] of each row. An RMSNorm has neither mean nor beta.
    x = as_matrix(dense_values(x))
    if mode != FUSED_CAST:
        return norm.forward(x, gamma, beta)
    cast = input_cast(linear)  # row-wise codes for y and column-wise codes for dw
    assert cast is not None
    codes, statistics = norm.forward(x, gamma, beta, cast)
    return linear.input.adopt(codes, x.dtype), statistics


def norm_backward(
    dh: Tensor, grad_norm_output: Tensor | None, saved: Sequence[Any], norm: Norm
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute dx [M, K], dgamma [K] and dbeta [K] from dh [M, K].

    Args:
        dh: Gradient of h from the linear layer.
        grad_norm_output: Gradient of the returned norm(x), or None.
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
    return norm.backward(dh, as_matrix(dense_values(x)), NormStatistics(mean, rstdev), gamma)


def norm_linear_forward(
    tensors: Sequence[Any], spec: NormLinearSpec, saves: bool, leading: tuple[int, ...]
) -> tuple[list[Any], list[Any]]:
    """Compute y [M, N] = norm(x) [M, K] @ weight [N, K].T + bias [N].

    Args:
        tensors: x [.., K], gamma [K], beta [K], weight [N, K] and bias [N]; None for an absent one.
        spec: Norm, linear layer and fusion mode of this kind of call.
        saves: Required by `LayerFunctions`; ignored, since the saved values are returned in either case.
        leading: Shape of x without K.

    Returns:
        [y, norm(x) or None] and [x, gamma, mean, rstdev, operand of norm(x), operand of the weight]. The backward pass
        reads the second list in this order.
    """
    x, gamma, beta, weight, bias = tensors
    h, statistics = norm_forward(x, gamma, beta, spec.norm, spec.linear, spec.norm_mode)
    # y [M, N] = h [M, K] @ weight [N, K].T + bias [N]
    y, *saved_by_linear = linear_forward(h, weight, bias, spec.linear, leading)
    saved_by_norm = [x, gamma, *statistics] if spec.linear.needs_grad_input else [None] * 4
    return [y, h if spec.returns_norm_output else None], [*saved_by_norm, *saved_by_linear]


def norm_linear_backward(
    operands: list[Any], spec: NormLinearSpec, dtypes: Dtypes, leading: tuple[int, ...]
) -> list[Any]:
    """Compute the gradients of the tensors of `norm_linear_forward`.

    Args:
        operands: dy [.., N], the gradient of the returned norm(x) or None, and the saved values. The list is emptied.
        spec: Norm, linear layer and fusion mode of this kind of call.
        dtypes: Dtypes of the gradients of weight and bias.
        leading: Shape of x without K.
    """
    grad_norm_output, *saved_by_norm = operands[1:6]
    linear_operands = [operands[0], *operands[6:]]
    operands.clear()
    # dh [M, K] = dy [M, N] @ weight [N, K], dw [N, K] = dy.T @ h [M, K]
    dh, dw, db = linear_backward(linear_operands, spec.linear, *dtypes[0])
    norm_gradients = (
        [None] * 3 if dh is None else norm_backward(dh, grad_norm_output, saved_by_norm, spec.norm)
    )
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
