"""Passes for a grouped linear layer in a chain, and its calls."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ....common.kernels import launch
from ...functions.caller_buffers import alias_buffer, check_buffers
from ...functions.grouped_call import (
    GroupedCall,
    GroupedSpec,
    groups_of_rows,
    stack_gradient,
    stack_members,
)
from ...functions.grouped_linear import grouped_linear_backward, grouped_linear_forward
from ...functions.grouped_products import convert_weights
from ...functions.grouped_request import UNASSIGNED_ROWS, runs_together
from ...functions.linear_spec import LinearSpec
from ...functions.weight_gradient import WeightGradient
from ...primitives.grouped_gemm import make_groups
from ...runtime.device import current_hardware
from ...runtime.warn_once import warn_once
from .contract import (
    BackwardResult,
    ForwardResult,
    InputFacts,
    Leading,
    OperationPasses,
    OpTensors,
    ReaderCast,
    Value,
)

GRAD_INPUT_BUFFER_KEY = "grad_input"
OUTPUT_BUFFER_KEY = "output"


class GroupedPasses(OperationPasses):
    """A grouped linear layer by the functions in `functions/grouped_linear.py`.

    Args:
        spec: The settings, apart from group row counts.
        x: Input metadata.
        names: Parameter names in order: weight0, bias0, weight1, .., or stacks.
        weights: Function that returns the parameters that are weights.
        bias_dtype: Bias dtype; None without biases.
        scale_bias: Biases are multiplied by a scale per row, the second extra input.
        grad_bias: Bias gradients are needed.
        buffers: Caller-owned buffers for the output and the input gradient.
    """

    listed = False

    def __init__(
        self,
        spec: GroupedSpec,
        x: InputFacts,
        names: tuple[str, ...],
        weights: Callable[[], Sequence[Tensor]],
        bias_dtype: torch.dtype | None,
        scale_bias: bool,
        grad_bias: bool,
        buffers: tuple[Tensor | None, Tensor | None],
    ) -> None:
        self.spec, self.names, self.weights, self.buffers = spec, names, weights, buffers
        self.total, self.device = math.prod(x.shape[:-1]), x.device
        dtype = spec.groups[0].dtype
        self.converts_to = None if x.dtype == dtype else dtype
        self.gradient_dtype = None if x.dtype == dtype else x.dtype
        self.has_bias, self.converts_bias = bias_dtype is not None, bias_dtype not in (None, dtype)
        self.scale_bias, self.grad_bias = scale_bias and self.has_bias, grad_bias
        self.call: GroupedCall | None = None

    def linears(self) -> tuple[LinearSpec, ...]:
        return self.spec.groups

    def bound(self, extra: Sequence[Tensor]) -> GroupedPasses:
        """Passes for a call with the row counts in the first extra input."""
        return self.with_call(self.bind_rows(extra[0]))

    def with_call(self, call: GroupedCall) -> GroupedPasses:
        """Passes for a call."""
        result = copy.copy(self)
        result.call = call
        return result

    def bind_rows(self, sizes: Tensor) -> GroupedCall:
        """Return the call with these row counts; they stay on a GPU if one launch serves all groups.

        Args:
            sizes: Rows per group, integers.

        Raises:
            ValueError: Row counts on the host are negative, or more than the input has.
        """
        spec = self.spec
        on_gpus = (
            sizes.is_cuda
            and self.device.type == "cuda"
            and launch.unavailable_reason(current_hardware()) is None
        )
        if on_gpus and self._runs_together(sizes):
            layout = make_groups(sizes.reshape(-1), self.total, self.device)
            return GroupedCall(spec, spec.groups, (), layout, clears=True)
        rows = tuple([int(size) for size in sizes.reshape(-1).tolist()])
        if min(rows) < 0 or sum(rows) > self.total:
            raise ValueError(
                f"split sizes {list(rows)} do not fit an input of {self.total} rows; give sizes >= 0 whose sum is at "
                "most that"
            )
        unassigned = self.total - sum(rows)
        # else the numbers have stayed on the GPU
        separate = not on_gpus or not spec.quantizers.fit(sizes)
        if separate and self._runs_together(rows, *[UNASSIGNED_ROWS] * (unassigned > 0)):
            return GroupedCall(spec, spec.groups, (), make_groups(rows, self.total, self.device))
        groups = groups_of_rows(spec, rows, self._warn_of_high_precision)
        return GroupedCall(spec, groups, rows, unassigned=unassigned)

    def _runs_together(self, splits: Sequence[int] | Tensor, *features: str) -> bool:
        """Return whether all groups in a call with these features are computed in one launch per step."""
        weights = self.weights() if self.spec.together else ()
        return runs_together(self.spec, splits, weights, self.total > 0, features)

    def _warn_of_high_precision(self, reason: str) -> None:
        if not self.spec.groups[0].traced:
            warn_once(f"GroupedLinear {reason}", f"GroupedLinear runs in high precision: {reason}")

    def fused_forward(
        self,
        x: Value,
        tensors: OpTensors,
        request: ReaderCast | None = None,
        compute_y: bool = True,
    ) -> ForwardResult:
        """Compute the products; without `compute_y` only the saved values, for recomputation."""
        call = self.call
        assert call is not None
        x = x.converted(self.converts_to).matrix()
        weights = self._of_kind("weight", tensors.parameters)
        biases = converted = None
        if self.has_bias:
            biases = self._of_kind("bias", tensors.parameters)
            converted = convert_weights(biases, call) if self.converts_bias else biases
        bias = None if self.scale_bias else converted
        saves = call.spec.needs_grad
        y, *saved = grouped_linear_forward(x.data, weights, bias, call, saves, compute_y)
        if self.scale_bias:
            scales = tensors.extra[1]
            saved = [*saved, scales, biases]
            if compute_y:
                y = scaled_bias(y, converted, scales, call)
        if self.buffers[0] is not None:
            self.buffers[0].copy_(y)
            y = alias_buffer(self.buffers[0])
        return ForwardResult(Value(y, x.leading, self.buffers[0] is None), saved)

    def fused_backward(
        self,
        operands: list[Any],
        leading: Leading,
        grads: Sequence[Any],
        request: ReaderCast | None = None,
    ) -> BackwardResult:
        call = self.call
        assert call is not None
        dy = Value(operands[0], leading).matrix()
        extra: tuple[Value | None, ...] = (None,)
        of_biases = None
        if self.scale_bias:
            scales, biases = operands[3:]
            of_biases, grad_scales = scaled_bias_backward(dy.data, biases, scales, call)
            extra = (None, Value(grad_scales.reshape(scales.shape)))
        products = [dy.data, *operands[1:3]]
        operands.clear()
        leading = dy.leading
        del dy
        dx, of_weights, sums = grouped_linear_backward(products, call)
        if not self.scale_bias:
            of_biases = sums
        elif not self.grad_bias:
            of_biases = None
        parameters = self._parameter_gradients(of_weights, of_biases)
        if dx is None:
            return BackwardResult(None, parameters, extra)
        if self.buffers[1] is not None:
            self.buffers[1].copy_(dx)
            dx = alias_buffer(self.buffers[1])
        return BackwardResult(Value(dx, leading).converted(self.gradient_dtype), parameters, extra)

    def _of_kind(self, kind: str, parameters: Sequence[Tensor]) -> Any:
        """The weights or biases: one stack, or a list with one per group."""
        members = [
            p for name, p in zip(self.names, parameters, strict=True) if name.startswith(kind)
        ]
        stacked = self.spec.stacked_weight if kind == "weight" else self.spec.stacked_bias
        return members[0] if stacked else members

    def _parameter_gradients(self, of_weights: Any, of_biases: Any) -> tuple[Any, ...]:
        """The gradients in parameter order; an absent kind is None."""
        made = {"weight": of_weights, "bias": of_biases}
        lists = {kind: iter(grads) for kind, grads in made.items() if isinstance(grads, list)}
        kinds = ["weight" if name.startswith("weight") else "bias" for name in self.names]
        return tuple([next(lists[kind]) if kind in lists else made[kind] for kind in kinds])


def scaled_bias(y: Tensor, biases: Any, scales: Tensor, call: GroupedCall) -> Tensor:
    """y_g + scales_g * bias_g for each group g, in float32."""
    scale_rows = call.rows_of(scales.reshape(-1, 1))
    parts = zip(call.rows_of(y), stack_members(biases), scale_rows, strict=True)
    return call.joined(
        [(part.float() + rows.float() * bias.float()).to(y.dtype) for part, bias, rows in parts]
    )


def scaled_bias_backward(
    dy: Tensor, biases: Any, scales: Tensor, call: GroupedCall
) -> tuple[Any, Tensor]:
    """Bias gradients [N], and scale gradients [M, 1]."""
    grads: list[Tensor | None] = []
    grad_scales: list[Tensor] = []
    scale_rows = call.rows_of(scales.reshape(-1, 1))
    for part, bias, rows in zip(call.rows_of(dy), stack_members(biases), scale_rows, strict=True):
        wide = part.float()
        grads.append((wide * rows.float()).sum(0).to(bias.dtype))
        grad_scales.append((wide @ bias.float()).to(scales.dtype).unsqueeze(1))
    of_biases = stack_gradient(grads, WeightGradient()) if call.spec.stacked_bias else grads
    return of_biases, call.joined(grad_scales)


def accept_buffers(
    x: InputFacts, width: int, options: Mapping[str, Any], dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Check the caller's buffers for the output [.., width] and the input gradient, and return both."""
    shape = torch.Size((*x.shape[:-1], width))
    kinds = (
        (OUTPUT_BUFFER_KEY, shape, dtype),
        (GRAD_INPUT_BUFFER_KEY, torch.Size(x.shape), x.dtype),
    )
    found: list[Tensor | None] = []
    for key, extents, kind in kinds:
        buffer = options.get(key)
        if buffer is not None:
            buffer = check_buffers(
                key, buffer, extents, torch.empty(0, dtype=kind, device=x.device)
            )
        found.append(buffer)
    return found[0], found[1]
