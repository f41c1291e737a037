"""The steps of a grouped linear layer in a chain, those of one linear layer over groups of rows, and its calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ....common.kernels import launch
from ....common.passes.linear import LinearFacts, backward_steps, forward_steps
from ....common.passes.step import Step
from ....common.passes.vocabulary import Layer, Named
from ...distributed.recompute import is_fp8_activation_recompute_enabled
from ...functions.caller_buffers import check_buffers
from ...functions.grouped_call import GroupedCall, GroupedSpec
from ...functions.grouped_request import (
    IRREGULAR,
    RECOMPUTATION,
    UNASSIGNED_ROWS,
    UNFIT_ROWS,
    are_regular,
    runs_together,
)
from ...functions.linear_spec import LinearSpec
from ...primitives.grouped_gemm import groups_of
from ..chain import InputFacts
from ..pass_builder import BackwardInputs, BackwardPart, Contribution, ForwardPart, PassBuilder, Value
from .linear_contribution import fitting

GRAD_INPUT_BUFFER_KEY = "grad_input"
OUTPUT_BUFFER_KEY = "output"


@dataclass(frozen=True)
class GroupedContribution(Contribution):
    """Steps of a grouped linear layer.

    Attributes:
        facts: Facts of the product; the name of the layer is filled in.
        count: Number of groups.
        bias: There are biases.
        grad_bias: Their gradients are needed.
        scale_bias: Biases are multiplied by a scale per row, the second extra input.
        convert: Dtype that the input is converted to; None if it has the right one.
        convert_gradient: Dtype that the gradient of the input is converted to.
        convert_bias: Biases are converted to the dtype of the product.
        stacked_weight: All weights are one parameter.
        stacked_bias: All biases are one parameter.
        output_buffer: The caller gives a buffer for the output.
        grad_buffer: The caller gives a buffer for the gradient of the input.
    """

    over_groups: ClassVar[bool] = True
    facts: LinearFacts
    count: int
    bias: bool
    grad_bias: bool
    scale_bias: bool
    convert: torch.dtype | None
    convert_gradient: torch.dtype | None
    convert_bias: bool
    stacked_weight: bool
    stacked_bias: bool
    output_buffer: bool
    grad_buffer: bool

    def forward(self, steps: PassBuilder, name: str, x: Value) -> ForwardPart:
        x = steps.matrix(steps.converted(x, self.convert))
        weights = self._members(steps, name, "weight", self.stacked_weight)
        part = forward_steps(self.facts._replace(layer=name), x.name, weights, None)
        y, made = part.output, list(part.steps)
        saved = [part.saved_input, part.saved_weight]
        biases = added = ""
        if self.bias:
            biases = self._members(steps, name, "bias", self.stacked_bias)
            added = biases
            if self.convert_bias:
                added = steps.one("convert", (biases,), f"{name}.biases_converted", Layer(name))
            if not self.scale_bias:
                made = [
                    replace(step, inputs=(*step.inputs, added)) if step.op == "product" else step
                    for step in made
                ]
        steps.steps += made
        if self.bias and self.scale_bias:
            scales = steps.one("to_shape", (f"{name}.extra1",), f"{name}.scales", (-1, 1))
            y = steps.one("grouped_scaled_bias", (y, added, scales), f"{name}.y_biased", Layer(name))
            saved += [scales, biases]
        if self.output_buffer:
            y = steps.one("copy_into", (y,), f"{name}.y_given", Named(name, OUTPUT_BUFFER_KEY))
        return ForwardPart(Value(y, x.leading), tuple(saved))

    def backward(self, steps: PassBuilder, name: str, dy: Value, kept: BackwardInputs) -> BackwardPart:
        dy = steps.matrix(dy)
        facts = self.facts._replace(layer=name, grad_bias=self.grad_bias and not self.scale_bias)
        part = backward_steps(facts, dy.name, kept.saved[0], kept.saved[1])
        grad_bias = part.grad_bias
        extra: tuple[Value | None, ...] = (None,)
        if self.bias and self.scale_bias:
            scales, biases = kept.saved[2:]
            made = (f"{name}.db", f"{name}.dscales_column")
            steps.steps.append(
                Step("grouped_scaled_bias_backward", (dy.name, biases, scales), made, Layer(name))
            )
            extra = (None, Value(steps.one("to_shape", (made[1],), f"{name}.dscales", (-1,))))
            grad_bias = made[0] if self.grad_bias else None
        steps.steps += part.steps
        grad_input = None
        if part.grad_input is not None:
            dx = part.grad_input
            if self.grad_buffer:
                dx = steps.one("copy_into", (dx,), f"{name}.dx_given", Named(name, GRAD_INPUT_BUFFER_KEY))
            grad_input = steps.converted(Value(dx, dy.leading), self.convert_gradient)
        grads = self._separate_gradients(steps, part.grad_weight, self.stacked_weight)
        if self.bias:
            of_biases = self._separate_gradients(steps, grad_bias, self.stacked_bias)
            if self.stacked_weight or self.stacked_bias:
                grads += of_biases
            else:  # in the order of the parameters: weight0, bias0, weight1, ..
                grads = [grad for pair in zip(grads, of_biases, strict=True) for grad in pair]
        return BackwardPart(grad_input, tuple(grads), extra)

    def _members(self, steps: PassBuilder, name: str, kind: str, stacked: bool) -> str:
        """Return the buffer of the parameters of one kind: the stack, or a list of one per group."""
        if stacked:
            return f"{name}.{kind}"
        members = tuple([f"{name}.{kind}{i}" for i in range(self.count)])
        return steps.one("members", members, f"{name}.of_groups.{kind}")

    def _separate_gradients(
        self, steps: PassBuilder, gradient: str | None, stacked: bool
    ) -> list[str | None]:
        """Return the buffers of the gradients of the parameters of one kind."""
        if stacked or gradient is None:
            return [gradient] * (1 if stacked else self.count)
        made = tuple([f"{gradient}{i}" for i in range(self.count)])
        steps.steps.append(Step("separate", (gradient,), made))
        return list(made)

    def is_plain(self, layer: str) -> bool:
        return self.facts.plain


@dataclass(frozen=True, slots=True, eq=False)
class GroupedKind:
    """A kind of call of a grouped linear layer, which is everything but the number of rows of each group.

    Attributes:
        spec: The settings.
        total: Number of rows of the input.
        device: Device of the input.
        weights: Function that returns the parameters that are weights.
    """

    spec: GroupedSpec
    total: int
    device: torch.device
    weights: Callable[[], Sequence[Tensor]]

    def call(self, sizes: Tensor) -> GroupedCall:
        """Return the call with these numbers of rows; they stay on a GPU if one launch serves all groups.

        Args:
            sizes: Number of rows of each group, integers.

        Raises:
            ValueError: Numbers of rows on the host are negative, or more than the input has.
        """
        spec = self.spec
        on_gpus = sizes.is_cuda and self.device.type == "cuda" and launch.missing() is None
        if on_gpus and self._runs_together(sizes, ()):
            layout = groups_of(sizes.reshape(-1), self.total, self.device)
            return GroupedCall(spec, spec.groups, (), layout, clears=True)
        rows = tuple([int(size) for size in sizes.reshape(-1).tolist()])
        if min(rows) < 0 or sum(rows) > self.total:
            raise ValueError(
                f"split sizes {list(rows)} do not fit an input of {self.total} rows; give sizes >= 0 whose sum is at "
                "most that"
            )
        unassigned = self.total - sum(rows)
        separate = not on_gpus or not spec.quantizers.fit(sizes)  # else the numbers have stayed on the GPU
        if separate and self._runs_together(rows, (UNASSIGNED_ROWS,) if unassigned else ()):
            return GroupedCall(spec, spec.groups, (), groups_of(rows, self.total, self.device))
        return GroupedCall(spec, self._fitting(rows), rows, unassigned=unassigned)

    def _runs_together(self, splits: Sequence[int] | Tensor, features: tuple[str, ...]) -> bool:
        """Return whether all groups of a call with these features are computed in one launch per step."""
        spec = self.spec
        if spec.request is None:  # a compiler is tracing
            return False
        if spec.together:
            if spec.quantizers.input is not None and is_fp8_activation_recompute_enabled():
                features += (RECOMPUTATION,)
            if not are_regular(self.weights()):
                features += (IRREGULAR,)
            if not spec.quantizers.fit(splits):
                features += (UNFIT_ROWS,)
        return runs_together(spec.request, spec.together, features, self.total > 0)

    def _fitting(self, rows: tuple[int, ...]) -> tuple[LinearSpec, ...]:
        """Return the specs of the groups, in high precision where the format does not support a group's rows."""
        groups, (n, k) = list(self.spec.groups), self.spec.extents
        for i, unquantized in enumerate(self.spec.unquantized):
            group = groups[i]
            quantizers = (group.input, group.weight, group.grad_output)
            if not fitting("GroupedLinear", quantizers, rows[i], k, n, group.traced):
                groups[i] = unquantized
        return tuple(groups)


def accepted_buffers(
    name: str,
    x: InputFacts,
    width: int,
    options: Mapping[str, Any],
    objects: MutableMapping[Any, Any],
    dtype: torch.dtype,
) -> tuple[bool, bool]:
    """Check the caller's buffers of the output [.., width] and the input gradient, and hand them to the steps.

    Returns:
        Whether the caller gives a buffer of the output, and of the input gradient.
    """
    shape = torch.Size((*x.shape[:-1], width))
    kinds = ((OUTPUT_BUFFER_KEY, shape, dtype), (GRAD_INPUT_BUFFER_KEY, torch.Size(x.shape), x.dtype))
    for key, extents, kind in kinds:
        if options.get(key) is not None:
            like = torch.empty(0, dtype=kind, device=x.device)
            objects[name, key] = check_buffers(key, options[key], extents, like)
    output, grad_input = (options.get(key) is not None for key, _, _ in kinds)
    return output, grad_input
