"""A linear product and its gradients as two functions, for libraries that place products in their graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..primitives.gemm import Epilogue, as_matrix, gemm
from ..primitives.operand import COLUMNWISE, ROWWISE, Operand, plain
from ..tensor.quantized_tensor import QuantizedTensorStorage
from ..tensor.quantizer import Quantizer
from ..tensor.storage.quantized_tensor_storage import plain_values


def functional_forward(
    input: Any,
    weight: Any,
    *,
    bias: Tensor | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    alpha: float | None = None,
    accumulate_into_out: bool = False,
    tensor_parallel_mode: str | None = None,
    tensor_parallel_group: Any = None,
    sequence_parallel: bool = False,
    with_quantized_compute: bool = False,
    input_quantizer: Quantizer | None = None,
    weight_quantizer: Quantizer | None = None,
    output_quantizer: Quantizer | None = None,
    backward_override: str | None = None,
    input_requires_grad: bool = True,
    weight_requires_grad: bool = True,
) -> tuple[Any, Any, Any]:
    """Compute y = x @ w.T + b for libraries that place products in their graphs.

    Args:
        input: x [.., K], plain or quantized.
        weight: w [N, K], plain or quantized.
        bias: b [N], or None.
        dtype: y's dtype, by default the weight's.
        out: Receives y, or accumulates it.
        alpha: Product factor.
        accumulate_into_out: Add y to `out`.
        with_quantized_compute: Quantize x and w by their quantizers, along both axes where a gradient needs it.
        output_quantizer: Quantizes y.

    Returns:
        y, and both matrices as the backward pass reads them.
    """
    _reject_parallelism(tensor_parallel_mode, backward_override)
    computed: torch.dtype = dtype or weight.dtype
    if with_quantized_compute:
        input = _quantized("input", input, input_quantizer, columnwise=weight_requires_grad)
        weight = _quantized("weight", weight, weight_quantizer, columnwise=input_requires_grad)
    else:
        input, weight = _plain(input, computed), _plain(weight, computed)
    bias = None if bias is None else bias.to(computed)
    shape = (*input.shape[:-1], weight.shape[0])
    y = _product(
        _operand(input, ROWWISE),
        _operand(weight, ROWWISE),
        computed,
        bias,
        out,
        alpha,
        accumulate_into_out,
    )
    y = y.view(shape)
    return (y if output_quantizer is None else output_quantizer(y)), input, weight


def functional_backward(
    grad_output: Any,
    input: Any,
    weight: Any,
    *,
    grad_input_alpha: float | None = None,
    input_requires_grad: bool = True,
    grad_weight_alpha: float | None = None,
    weight_requires_grad: bool = True,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    grad_weight: Tensor | None = None,
    accumulate_into_grad_weight: bool = False,
    grad_input: Tensor | None = None,
    accumulate_into_grad_input: bool = False,
    tensor_parallel_mode: str | None = None,
    tensor_parallel_group: Any = None,
    sequence_parallel: bool = False,
    with_quantized_compute: bool = False,
    input_quantizer: Quantizer | None = None,
    weight_quantizer: Quantizer | None = None,
    grad_output_quantizer: Quantizer | None = None,
    grad_input_quantizer: Quantizer | None = None,
) -> tuple[Any, Tensor | None]:
    """Compute dx [.., K] = dy [.., N] @ w and dw [N, K] = dy.T @ x; see `functional_forward`.

    Quantized matrices are read directly.

    Args:
        grad_weight: Receives dw, or accumulates it with `accumulate_into_grad_weight`.
        grad_input: Receives dx, or accumulates it with `accumulate_into_grad_input`.

    Returns:
        dx and dw; None where no gradient is needed.
    """
    _reject_parallelism(tensor_parallel_mode, None)
    computed: torch.dtype = dtype or grad_output.dtype
    dy = grad_output
    if with_quantized_compute:
        dy = _quantized("grad_output", dy, grad_output_quantizer, columnwise=weight_requires_grad)
    dx = dw = None
    if input_requires_grad:
        w = _quantized("weight", weight, weight_quantizer) if with_quantized_compute else weight
        operands = _operand(dy, ROWWISE), _operand(w, COLUMNWISE)
        result = _product(
            *operands,
            computed,
            None,
            grad_input,
            grad_input_alpha,
            accumulate_into_grad_input,
            True,
        )
        dx = result.view(*dy.shape[:-1], w.shape[-1])
        dx = dx if grad_input_quantizer is None else grad_input_quantizer(dx)
    if weight_requires_grad:
        x = _quantized("input", input, input_quantizer) if with_quantized_compute else input
        operands = _operand(dy, COLUMNWISE), _operand(x, COLUMNWISE)
        dw = _product(
            *operands,
            computed,
            None,
            grad_weight,
            grad_weight_alpha,
            accumulate_into_grad_weight,
            True,
        )
    return dx, dw


def _reject_parallelism(mode: str | None, override: str | None) -> None:
    if mode is not None or override is not None:
        raise NotImplementedError(
            f"tensor_parallel_mode={mode!r} and backward_override={override!r} are unsupported in the functional form; "
            "use the BasicLinear operation"
        )


def _quantized(name: str, matrix: Any, quantizer: Quantizer | None, columnwise: bool = True) -> Any:
    """Return a matrix quantized by its quantizer; itself if it is quantized already."""
    if isinstance(matrix, QuantizedTensorStorage):
        return matrix
    if quantizer is None:
        raise ValueError(
            f"with_quantized_compute=True with {name}_quantizer=None; give the quantizer of {name}"
        )
    quantizer.set_usage(rowwise=True, columnwise=columnwise)
    return quantizer(matrix)


def _plain(matrix: Any, dtype: torch.dtype) -> Tensor:
    return plain_values(matrix).to(dtype)


def _operand(matrix: Any, direction: Any) -> Operand:
    """Return a matrix as a product reads it that contracts its columns (ROWWISE) or its rows (COLUMNWISE)."""
    if isinstance(matrix, QuantizedTensorStorage):
        return matrix.contract(direction)
    rows = as_matrix(matrix)
    return plain(rows if direction is ROWWISE else rows.t())


def _product(
    a: Operand,
    b: Operand,
    dtype: torch.dtype,
    bias: Tensor | None,
    out: Tensor | None,
    alpha: float | None,
    accumulate: bool,
    exact: bool = False,
) -> Tensor:
    if alpha is None or alpha == 1.0:
        if out is None:
            return gemm(a, b, Epilogue(dtype, bias=bias, exact=exact))
        return gemm(a, b, Epilogue(out.dtype, bias, as_matrix(out), accumulate, exact))
    y = gemm(a, b, Epilogue(dtype, exact=exact)) * alpha
    y = y if bias is None else y + bias
    if out is None:
        return y
    target = as_matrix(out)
    return target.add_(y) if accumulate else target.copy_(y)
