"""Neighboring operations that one product or one norm computes together, as pattern tables.

A row is a pair of pass kinds and the function that computes both. The function returns None where
the pair does not match in this call; each operation then runs by itself. An extra output gradient
has no parameters, so a backward function returns the result of the other operation.

| pass | operations | computed by |
| --- | --- | --- |
| forward | linear, bias | the product, which adds the bias in its epilogue |
| forward | linear, in-place addition | the product, which accumulates into the extra input |
| backward | in-place extra output, linear | the product, which accumulates dx into the gradient of the extra output |
| backward | extra output, norm | the gradient of the norm, which adds the gradient of the extra output |

A norm, an activation, an activation gradient and bias sums quantize their result for the next
product by `ReaderCast` instead. Grouped products take part in neither.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...functions.linear_spec import sums_over_ranks
from ...primitives.gemm import as_matrix
from ...tensor.quantized_tensor import QuantizedTensorStorage
from .bias import BiasPasses
from .contract import BackwardResult, ForwardResult, Leading, OpTensors, Value
from .extra_tensors import AddPasses, ExtraOutputPasses
from .linear import LinearPasses
from .normalization import NormPasses

Forward = Callable[
    [Any, Any, Value, OpTensors, OpTensors], "tuple[ForwardResult, ForwardResult] | None"
]
Backward = Callable[[Any, Any, list[Any], Leading, Sequence[Any]], "BackwardResult | None"]


def _linear_bias(
    linear: LinearPasses,
    bias: BiasPasses,
    x: Value,
    linear_tensors: OpTensors,
    bias_tensors: OpTensors,
) -> tuple[ForwardResult, ForwardResult] | None:
    if sums_over_ranks(linear.spec.parallel, "row"):
        return None  # the bias is added to the sum
    result = linear.fused_forward(x, linear_tensors, bias=bias.bias(bias_tensors))
    return result, ForwardResult(result.output)


def _linear_add(
    linear: LinearPasses,
    add: AddPasses,
    x: Value,
    linear_tensors: OpTensors,
    add_tensors: OpTensors,
) -> tuple[ForwardResult, ForwardResult] | None:
    if not add.in_place or sums_over_ranks(linear.spec.parallel, "row"):
        return None
    result = linear.fused_forward(x, linear_tensors, total=add.total(add_tensors))
    return result, ForwardResult(result.output)


def _extra_output_linear(
    output: ExtraOutputPasses,
    linear: LinearPasses,
    operands: list[Any],
    leading: Leading,
    grads: Sequence[Any],
) -> BackwardResult | None:
    (extra,) = grads
    fits = output.in_place and linear.spec.needs_grad_input and linear.gradient_dtype is None
    if (
        not fits
        or isinstance(extra, QuantizedTensorStorage)
        or sums_over_ranks(linear.spec.parallel, "column")
    ):
        return None
    return linear.fused_backward(operands, leading, (), total=output.total(extra))


def _extra_output_norm(
    output: ExtraOutputPasses,
    norm: NormPasses,
    operands: list[Any],
    leading: Leading,
    grads: Sequence[Any],
) -> BackwardResult | None:
    (extra,) = grads
    fits = not output.in_place and norm.rows_only and norm.gradient_dtype is None
    if not fits or isinstance(extra, QuantizedTensorStorage):
        return None
    return norm.fused_backward(operands, leading, (), addend=as_matrix(extra))


FORWARD_PAIRS: dict[tuple[type, type], Forward] = {
    (LinearPasses, BiasPasses): _linear_bias,
    (LinearPasses, AddPasses): _linear_add,
}
BACKWARD_PAIRS: dict[tuple[type, type], Backward] = {
    (ExtraOutputPasses, LinearPasses): _extra_output_linear,
    (ExtraOutputPasses, NormPasses): _extra_output_norm,
}
