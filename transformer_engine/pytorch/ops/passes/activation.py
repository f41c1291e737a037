"""Passes for activations and gated linear units, scaled row by row or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...functions.fusions import has_one_scale, unsupported_gradient_cast
from ...functions.gathered_operands import GradientOperands
from ...functions.linear_operands import dequantized
from ...functions.row_operations import (
    block_order,
    row_scale,
    row_scale_backward,
    situ_glu,
    situ_glu_backward,
)
from ...primitives.activation import (
    ActivationParams,
    activation_backward,
    activation_forward,
    gradient_fuses,
)
from ...primitives.gemm import as_matrix
from ...tensor.quantizer import Quantizer
from .contract import (
    BackwardResult,
    ForwardResult,
    Leading,
    OperationPasses,
    OpTensors,
    ReaderCast,
    Value,
)


class ActivationPasses(OperationPasses):
    """An activation.

    Args:
        kind: Activation name.
        parameters: Its parameters.
        constants: Constants of SiTUGLU; None for activations in the table.
        dtypes: Input and computation dtypes.
        interleave: Alternating block size in a gated unit; None for halves.
        cache: Quantizer for the saved input; None to save its values.
        scaled: The result is multiplied by a scale per row, an extra input.
        grad_scales: The scale gradient is needed.
    """

    def __init__(
        self,
        kind: str,
        parameters: ActivationParams,
        constants: tuple[float, float] | None,
        dtypes: tuple[torch.dtype, torch.dtype],
        interleave: int | None,
        cache: Quantizer | None,
        scaled: bool,
        grad_scales: bool,
    ) -> None:
        self.kind, self.parameters, self.constants = kind, parameters, constants
        self.interleave, self.cache = interleave, cache
        self.scaled, self.grad_scales = scaled, grad_scales
        input_dtype, compute_dtype = dtypes
        converts = input_dtype != compute_dtype
        self.convert = compute_dtype if converts else None
        self.gradient_dtype = input_dtype if converts else None
        # An activation in the table, whose kernels read x and write y and dx without another step.
        from_table = constants is None and interleave is None
        self.casts_output = constants is None and not scaled
        self.casts_gradient = from_table and not converts
        self.listed = from_table and not converts and cache is None and not scaled

    def fused_forward(
        self, x: Value, tensors: OpTensors, request: ReaderCast | None = None
    ) -> ForwardResult:
        x = x.converted(self.convert).matrix()
        if self.interleave is not None:
            x = Value(block_order(x.data, (-1, 2, self.interleave)), x.leading)
        saved = x.data if self.cache is None else self.cache.operands(x.data, True, False).rowwise
        if self.scaled:
            (scales,) = tensors.extra
            y = row_scale(self._activation(x.data), scales)
            return ForwardResult(Value(y, x.leading), (saved, scales))
        if request is None:
            return ForwardResult(Value(self._activation(x.data), x.leading), (saved,))
        codes = activation_forward(self.kind, x.data, self.parameters, request.cast)
        return ForwardResult(
            Value(request.quantizer.adopt(codes, x.data.dtype), x.leading), (saved,)
        )

    def _activation(self, x: Tensor) -> Tensor:
        if self.constants is not None:
            return situ_glu(x, self.constants)
        return activation_forward(self.kind, x, self.parameters)

    def fused_backward(
        self,
        operands: list[Any],
        leading: Leading,
        grads: Sequence[Any],
        request: ReaderCast | None = None,
    ) -> BackwardResult:
        dy = Value(operands[0], leading).matrix()
        x = as_matrix(
            operands[1] if self.cache is None else dequantized(operands[1], dy.data.dtype)
        )
        gradient, extra = dy.data, ()
        if self.scaled:
            gradient, grad_scales = row_scale_backward(dy.data, self._activation(x), operands[2])
            extra = (Value(grad_scales) if self.grad_scales else None,)
        operands.clear()
        if request is not None and self._casts_gradient(request):
            dtype = x.dtype
            codes, sums = activation_backward(
                self.kind, gradient, x, self.parameters, request.cast, request.sums
            )
            return BackwardResult(
                Value(GradientOperands(request.quantizer.adopt(codes, dtype), sums), dy.leading),
                (),
                extra,
            )
        if self.constants is not None:
            dx = situ_glu_backward(gradient, x, self.constants)
        else:
            dx = activation_backward(self.kind, gradient, x, self.parameters)
        if self.interleave is not None:
            dx = block_order(dx, (2, -1, self.interleave))
        return BackwardResult(Value(dx, dy.leading).converted(self.gradient_dtype), (), extra)

    def _casts_gradient(self, request: ReaderCast) -> bool:
        """Whether the gradient kernel quantizes its result."""
        separate_sums = request.sums is not None and not gradient_fuses(request.cast.spec, True)
        reason = unsupported_gradient_cast(self.kind, has_one_scale(request.cast), separate_sums)
        return reason is None
