"""y [.., N] = x [.., K] @ w [N, K].T + b as two functions, for libraries that place products in graphs of their own.

lightning-thunder keeps quantizers and what a backward needs in its own traces, and calls these by their names.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from ..cpp_extensions import general_gemm
from ..tensor.quantized_tensor import QuantizedTensorStorage
from ..tensor.quantizer import Quantizer
from .op import BasicOperation


class BasicLinear(BasicOperation):
    """The functions of a product; a layer with parameters is `te.Linear`."""

    def __init__(self, *args: Any, **kwargs: Any):
        raise NotImplementedError(
            "ops.BasicLinear has its functional passes only, _functional_forward and _functional_backward; "
            "make te.Linear(in_features, out_features) for a layer"
        )

    def op_forward(self, ctx: Any, input_: Tensor, **options: Any) -> NoReturn:
        raise NotImplementedError("ops.BasicLinear makes no layer; use te.Linear")

    def op_backward(self, ctx: Any, grad_output: Tensor) -> NoReturn:
        raise NotImplementedError("ops.BasicLinear makes no layer; use te.Linear")

    @staticmethod
    def _functional_forward(
        input: Any,
        weight: Any,
        *,
        bias: Tensor | None = None,
        dtype: torch.dtype | None = None,
        with_quantized_compute: bool = False,
        input_quantizer: Quantizer | None = None,
        weight_quantizer: Quantizer | None = None,
        output_quantizer: Quantizer | None = None,
        input_requires_grad: bool = True,
        weight_requires_grad: bool = True,
    ) -> tuple[Any, Any, Any]:
        """(y, x, w): the product, and both matrices as the backward reads them.

        with_quantized_compute   x and w are quantized by their quantizers, along both axes where a gradient needs it
        """
        computed: torch.dtype = dtype or weight.dtype
        if with_quantized_compute:
            input = _quantized("input", input, input_quantizer, columnwise=weight_requires_grad)
            weight = _quantized("weight", weight, weight_quantizer, columnwise=input_requires_grad)
        else:
            input, weight = _plain(input, computed), _plain(weight, computed)
        bias = None if bias is None else bias.to(computed)
        y = general_gemm(
            weight, input, out_dtype=computed, bias=bias, layout="TN", quantization_params=output_quantizer
        )[0]
        return y, input, weight

    @staticmethod
    def _functional_backward(
        grad_output: Any,
        input: Any,
        weight: Any,
        *,
        input_requires_grad: bool = True,
        weight_requires_grad: bool = True,
        dtype: torch.dtype | None = None,
        with_quantized_compute: bool = False,
        input_quantizer: Quantizer | None = None,
        weight_quantizer: Quantizer | None = None,
        grad_output_quantizer: Quantizer | None = None,
        grad_input_quantizer: Quantizer | None = None,
    ) -> tuple[Any, Tensor | None]:
        """(dx [.., K] = dy [.., N] @ w, dw [N, K] = dy.T @ x); None where no gradient is needed.

        Matrices that are codes already, as the forward gave them, are read as they are.
        """
        dtype = dtype or grad_output.dtype
        dy = grad_output
        if with_quantized_compute:
            dy = _quantized("grad_output", dy, grad_output_quantizer, columnwise=weight_requires_grad)
        grad_input = grad_weight = None
        if input_requires_grad:
            w = _quantized("weight", weight, weight_quantizer) if with_quantized_compute else weight
            grad_input = general_gemm(
                w, dy, out_dtype=dtype, layout="NN", grad=True, use_split_accumulator=True,
                quantization_params=grad_input_quantizer,
            )[0]  # fmt: skip
        if weight_requires_grad:
            x = _quantized("input", input, input_quantizer) if with_quantized_compute else input
            grad_weight = general_gemm(
                x, dy, out_dtype=dtype, layout="NT", grad=True, use_split_accumulator=True
            )[0]
        return grad_input, grad_weight


def _quantized(name: str, matrix: Any, quantizer: Quantizer | None, columnwise: bool = True) -> Any:
    """The codes of a matrix; itself where it is codes already. ValueError where nothing says how."""
    if isinstance(matrix, QuantizedTensorStorage):
        return matrix
    if quantizer is None:
        raise ValueError(
            f"with_quantized_compute=True with {name}_quantizer=None; give the quantizer of {name}"
        )
    quantizer.set_usage(rowwise=True, columnwise=columnwise)
    return quantizer(matrix)


def _plain(matrix: Any, dtype: torch.dtype) -> Tensor:
    """Values of a dtype, decoded where they are codes."""
    return (matrix.dequantize() if isinstance(matrix, QuantizedTensorStorage) else matrix).to(dtype)
