"""The passes of a linear product y = x @ w.T in a chain, and their spec."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....common.recipe import Recipe
from ...distributed.tensor_parallel import TensorParallel
from ...functions.linear import linear_backward, linear_forward
from ...functions.linear_spec import (
    HIGH_PRECISION,
    IDENTITY,
    Accumulation,
    LinearSpec,
    gradient_cast,
    input_cast,
    sums_over_ranks,
)
from ...functions.weight_gradient import WeightGradient
from ...runtime.warn_once import warn_once
from ...tensor.quantizer import Calibrating, Quantizer
from .contract import BackwardResult, CastRequest, ForwardResult, Given, OperationCall, OperationPasses, Value


class LinearPasses(OperationPasses):
    """y = x @ weight.T by the functions of `functions/linear.py`.

    Args:
        spec: Settings of the product.
        dtype: Dtype of the weight's gradient.
        x_dtype: Dtype of the input, which is converted to the dtype of the product.
    """

    def __init__(self, spec: LinearSpec, dtype: torch.dtype, x_dtype: torch.dtype) -> None:
        self.spec, self.dtype = spec, dtype
        self.converts_to = None if x_dtype == spec.dtype else spec.dtype
        self.gradient_dtype = None if x_dtype == spec.dtype else x_dtype
        dequantizes = spec.backward == HIGH_PRECISION and spec.needs_grad_weight
        self.listed = self.converts_to is None and not dequantizes

    def linears(self) -> tuple[LinearSpec, ...]:
        return (self.spec,)

    def input_request(self) -> CastRequest | None:
        cast = input_cast(self.spec) if self.converts_to is None else None
        return None if cast is None else CastRequest(self.spec.input, cast)

    def gradient_request(self, earlier: CastRequest | None) -> CastRequest | None:
        cast = gradient_cast(self.spec)
        return None if cast is None else CastRequest(self.spec.grad_output, cast)

    def fused_forward(
        self,
        x: Value,
        given: Given,
        request: CastRequest | None = None,
        bias: Tensor | None = None,
        total: Tensor | None = None,
    ) -> ForwardResult:
        """Compute the product; with a bias add it, with a total accumulate y into it (see `fused_patterns.py`)."""
        x = x.converted(self.converts_to)
        if self.spec.plain:
            x = x.values()
        leading = x.leading_dimensions()
        y, *saved = linear_forward(x.data, given.parameters[0], bias, self.spec, leading, total=total)
        summed = sums_over_ranks(self.spec.parallel, "row")
        return ForwardResult(Value(y, leading, total is None and not summed), saved)

    def fused_backward(
        self,
        operands: list[Any],
        leading: tuple[int, ...] | None,
        grads: Sequence[Any],
        request: CastRequest | None = None,
        total: Tensor | None = None,
    ) -> BackwardResult:
        """Compute both gradients; with a total accumulate dx into it."""
        if leading is None:
            leading = tuple(operands[0].shape[:-1])
        made = linear_backward(operands, self.spec, (self.dtype, self.dtype), total=total)
        if made.input is None:
            return BackwardResult(None, (made.weight,))
        return BackwardResult(Value(made.input, leading).converted(self.gradient_dtype), (made.weight,))


def accumulation_of(recipe: Recipe | None) -> Accumulation:
    """Return which products of a recipe promote partial sums to float32."""
    settings = [getattr(recipe, f"fp8_gemm_{product}", None) for product in ("fprop", "dgrad", "wgrad")]
    if any(setting is None for setting in settings):
        return Accumulation()
    return Accumulation(*[setting.use_split_accumulator for setting in settings])  # pyright: ignore


def fitting(kind: str, quantizers: Sequence[Quantizer], m: int, k: int, n: int, traced: bool) -> bool:
    """Return whether the formats take x [m, k], w [n, k] and dy [m, n]; otherwise warn once that they do not."""
    for quantizer, extents in zip(quantizers, ((m, k), (n, k), (m, n)), strict=True):
        reason = quantizer.unsupported_shape_reason(extents, True, True)
        if reason is not None:
            if not traced:
                warn_once(f"{kind} {reason}", f"{kind} runs in high precision: {reason}")
            return False
    return True


def linear_spec(
    call: OperationCall,
    dtype: torch.dtype,
    quantizers: Sequence[Quantizer] | None,
    parallel: TensorParallel,
    gradient: WeightGradient,
    needs: tuple[bool, bool],
    plain: bool,
) -> LinearSpec:
    """Return the spec of a product.

    Args:
        call: Facts of the call.
        dtype: Dtype that the product is computed in.
        quantizers: Quantizers of input, weight and output gradient; None for an unquantized product.
        parallel: The boundary to the tensor-parallel group.
        gradient: Destination of the weight gradient.
        needs: Whether the gradients of input and weight are needed.
        plain: Matrices are multiplied unquantized.
    """
    state = call.state
    used: Sequence[Quantizer] = (IDENTITY, IDENTITY, IDENTITY)
    if quantizers is not None and state.enabled:
        used = quantizers
    elif quantizers is not None:
        used = (Calibrating(quantizers[0]), Calibrating(quantizers[1]), IDENTITY)
    recipe = state.recipe if state.enabled and quantizers is not None else None
    return LinearSpec(
        dtype=dtype,
        input=used[0],
        weight=used[1],
        grad_output=used[2],
        accumulation=accumulation_of(recipe),
        parallel=parallel,
        weight_gradient=gradient,
        backward=getattr(recipe, "backward_override", None) or "quantized",
        needs_grad_input=needs[0],
        needs_grad_weight=needs[1],
        traced=call.traced,
        communicates=parallel.mode is not None and parallel.size > 1,
        plain=plain,
        may_run_again=not (call.traced or call.saves),
    )
