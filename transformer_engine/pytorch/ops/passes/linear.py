"""Passes for a linear product y = x @ w.T in a chain, and their spec."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....common.recipe import Recipe
from ...distributed.tensor_parallel import TensorParallel
from ...functions.linear import linear_backward, linear_forward
from ...functions.linear_operands import gradient_cast, input_cast
from ...functions.linear_spec import (
    HIGH_PRECISION,
    IDENTITY,
    UNQUANTIZED,
    LinearSpec,
    ProductQuantizers,
    build_linear_spec,
    sums_over_ranks,
)
from ...functions.precision import runs_quantized
from ...functions.weight_gradient import WeightGradient
from ...runtime.warn_once import warn_once
from ...tensor.quantizer import Calibrating, Quantizer
from .contract import (
    BackwardResult,
    ForwardResult,
    Leading,
    OperationCall,
    OperationPasses,
    OpTensors,
    ReaderCast,
    Value,
)


class LinearPasses(OperationPasses):
    """y = x @ weight.T by the functions in `functions/linear.py`.

    Args:
        spec: Product settings.
        x_dtype: Input dtype; the input is converted to the product dtype.
    """

    def __init__(self, spec: LinearSpec, x_dtype: torch.dtype) -> None:
        self.spec = spec
        self.converts_to = None if x_dtype == spec.dtype else spec.dtype
        self.gradient_dtype = None if x_dtype == spec.dtype else x_dtype
        dequantizes = spec.backward_operands == HIGH_PRECISION and spec.needs_grad_weight
        self.listed = self.converts_to is None and not dequantizes

    def linears(self) -> tuple[LinearSpec, ...]:
        return (self.spec,)

    def input_request(self) -> ReaderCast | None:
        cast = input_cast(self.spec) if self.converts_to is None else None
        return None if cast is None else ReaderCast(self.spec.input_quantizer, cast)

    def gradient_request(self, earlier: ReaderCast | None) -> ReaderCast | None:
        cast = gradient_cast(self.spec)
        return None if cast is None else ReaderCast(self.spec.grad_output_quantizer, cast)

    def fused_forward(
        self,
        x: Value,
        tensors: OpTensors,
        request: ReaderCast | None = None,
        bias: Tensor | None = None,
        total: Tensor | None = None,
    ) -> ForwardResult:
        """Compute the product; with a bias add it, with a total accumulate y into it (see `passes/patterns.py`)."""
        x = x.converted(self.converts_to)
        if self.spec.is_unquantized:
            x = x.values()
        leading = x.leading_dimensions()
        y, *saved = linear_forward(x.data, tensors.parameters[0], bias, self.spec, total)
        summed = sums_over_ranks(self.spec.parallel, "row")
        return ForwardResult(Value(y, leading, total is None and not summed), saved)

    def fused_backward(
        self,
        operands: list[Any],
        leading: Leading,
        grads: Sequence[Any],
        request: ReaderCast | None = None,
        total: Tensor | None = None,
    ) -> BackwardResult:
        """Compute both gradients; with a total accumulate dx into it."""
        if leading is None:
            leading = tuple(operands[0].shape[:-1])
        dx, dw, _ = linear_backward(operands, self.spec, accumulate_into=total)
        return BackwardResult(
            None if dx is None else Value(dx, leading).converted(self.gradient_dtype), (dw,)
        )


def fitting(
    kind: str,
    quantizers: Sequence[Quantizer],
    m: int,
    k: int,
    n: int,
    traced: bool,
    recipe: Recipe | None = None,
) -> bool:
    """Return whether x [m, k] @ w [n, k].T is quantized; warn once if the formats do not support its shapes.

    With a recipe, NVTE_FP8_AUTO applies to the call.
    """
    product = ProductQuantizers(quantizers[0], quantizers[1], IDENTITY, quantizers[2], IDENTITY)

    def warn(reason: str) -> None:
        if not traced:
            warn_once(f"{kind} {reason}", f"{kind} runs in high precision: {reason}")

    return runs_quantized(product, (m, k, n), warn, recipe)


def linear_spec(
    call: OperationCall,
    dtype: torch.dtype,
    quantizers: Sequence[Quantizer] | None,
    parallel: TensorParallel,
    gradient: WeightGradient,
    needs: tuple[bool, bool],
    plain: bool,
    grad_weight_dtype: torch.dtype,
) -> LinearSpec:
    """Return the spec for a product.

    Args:
        call: Call metadata.
        dtype: Dtype that the product is computed in.
        quantizers: Quantizers for input, weight and output gradient; None for an unquantized product.
        parallel: The boundary to the tensor-parallel group.
        gradient: Weight gradient destination.
        needs: Whether the input and weight gradients are needed.
        plain: Matrices are multiplied unquantized.
        grad_weight_dtype: Weight gradient dtype.
    """
    product, recipe, state = UNQUANTIZED, None, call.state
    if quantizers is not None and state.enabled:
        recipe = state.recipe
        product = ProductQuantizers(quantizers[0], quantizers[1], IDENTITY, quantizers[2], IDENTITY)
    elif quantizers is not None:
        recorded = Calibrating(quantizers[0]), Calibrating(quantizers[1])
        product = ProductQuantizers(*recorded, IDENTITY, IDENTITY, IDENTITY)
    return build_linear_spec(
        dtype,
        product,
        recipe,
        parallel,
        gradient,
        (*needs, False),
        traced=call.traced,
        is_unquantized=plain,
        grad_weight_dtype=grad_weight_dtype,
        may_run_again=not (call.traced or call.saves),
    )
