"""ScaledTanhSReLU: a squared ReLU with a soft bound, multiplied by a scale per row."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ....common.checks import number
from ....common.numbers import to_bool, to_float
from ..operation import BasicOperation
from .scaled_activation import warn_recompute


class ScaledTanhSReLU(BasicOperation):
    """y = b^2 * scales[.., None] with b = s * tanh(max(x, 0) / s), computed in float32.

    The extra input holds one scale per row, in the leading dimensions of x.

    Args:
        tanh_clamp_scale: s, the bound of b: finite and greater than 0.
        activation_recompute_in_mlp: Compute the activation again in the backward pass of a fused
            grouped MLP. Outside it a warning states that the argument has no effect.

    Raises:
        ValueError: `tanh_clamp_scale` is not finite or not greater than 0.
    """

    num_extra_inputs = 1

    def __init__(
        self, *, tanh_clamp_scale: float, activation_recompute_in_mlp: bool = False
    ) -> None:
        super().__init__()
        self.tanh_clamp_scale = to_float("tanh_clamp_scale", tanh_clamp_scale)
        number("tanh_clamp_scale", self.tanh_clamp_scale)
        if self.tanh_clamp_scale <= 0.0:
            raise ValueError(
                f"tanh_clamp_scale={self.tanh_clamp_scale} is not above 0; give a number above 0"
            )
        self.activation_recompute_in_mlp = to_bool(
            "activation_recompute_in_mlp", activation_recompute_in_mlp
        )

    def own_tensors(self) -> list[Tensor]:
        return []  # parameters that others add, such as adapters, do not belong to the operation

    def op_forward(self, *_: Any, **__: Any) -> Tensor:
        raise RuntimeError(
            f"{type(self).__name__} has an extra input, the scales; call fuser_forward"
        )

    def op_backward(self, *_: Any, **__: Any) -> tuple[Tensor, Iterable[Tensor | None]]:
        raise RuntimeError(
            f"{type(self).__name__} has an extra input, the scales; call fuser_backward"
        )

    def fuser_forward(
        self,
        basic_op_ctxs: list[Any],
        input_: Tensor,
        *,
        basic_op_extra_inputs: list[tuple[Tensor, ...]],
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> tuple[Tensor, Iterable[Iterable[Tensor | None]]]:
        if self.activation_recompute_in_mlp:
            warn_recompute(self)
        (scales,) = basic_op_extra_inputs[0]
        if scales.numel() * input_.shape[-1] != input_.numel():
            raise ValueError(
                f"scales are {list(scales.shape)} for an input {list(input_.shape)}; give one scale per row"
            )
        ctx = basic_op_ctxs[0]
        if ctx.requires_grad:
            ctx.save_for_backward(input_, scales)
        bounded, _ = self._bound_input(input_)
        y = bounded.square() * scales.float().reshape(*input_.shape[:-1], 1)
        return y.to(input_.dtype), [()]

    def fuser_backward(
        self,
        basic_op_ctxs: list[Any],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[Tensor | None, ...]],
    ) -> tuple[Tensor, Iterable[Iterable[Tensor | None]], Iterable[Iterable[Tensor | None]]]:
        x, scales = basic_op_ctxs[0].saved_tensors
        bounded, tanh = self._bound_input(x)
        dy = grad_output.float()
        row_scales = scales.float().reshape(*x.shape[:-1], 1)
        dx = dy * row_scales * (2.0 * bounded * (1.0 - tanh.square()))
        dscales = (dy * bounded.square()).sum(-1)
        return dx.to(x.dtype), [()], [(dscales.reshape(scales.shape).to(scales.dtype),)]

    def _bound_input(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """b = s * tanh(max(x, 0) / s) and the tanh, float32."""
        tanh = torch.tanh(torch.relu(x.float()) / self.tanh_clamp_scale)
        return self.tanh_clamp_scale * tanh, tanh
