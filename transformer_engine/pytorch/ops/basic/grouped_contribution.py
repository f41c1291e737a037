"""The steps of a grouped linear layer: those of one linear layer per group, between a split and a concatenation."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ....common.passes.linear import LinearFacts, backward_steps, forward_steps
from ....common.passes.step import Step
from ....common.passes.vocabulary import ColumnSum, Named
from ..pass_builder import BackwardInputs, BackwardPart, Contribution, ForwardPart, PassBuilder, Value

GRAD_INPUT_BUFFER_KEY = "grad_input"
OUTPUT_BUFFER_KEY = "output"


@dataclass(frozen=True)
class GroupedContribution(Contribution):
    """Steps of a grouped linear layer: those of one linear layer per group, between a split and a concatenation.

    Attributes:
        groups: Facts of each group's product.
        bias: There are biases.
        grad_bias: Their gradients are needed.
        scale_bias: Biases are multiplied by a scale per row, the second extra input.
        convert: Dtype that input and biases are converted to; None if they have the right one.
        convert_weight: The same for weights.
        convert_gradient: Dtype that the gradient of the input is converted to.
        bias_dtype: Dtype of the biases.
        stacked_weight: All weights are one parameter.
        stacked_bias: All biases are one parameter.
        output_buffer: The caller gives a buffer for the output.
        grad_buffer: The caller gives a buffer for the gradient of the input.
    """

    groups: tuple[LinearFacts, ...]
    bias: bool
    grad_bias: bool
    scale_bias: bool
    convert: torch.dtype | None
    convert_weight: torch.dtype | None
    convert_gradient: torch.dtype | None
    bias_dtype: torch.dtype
    convert_bias: torch.dtype | None
    stacked_weight: bool
    stacked_bias: bool
    output_buffer: bool
    grad_buffer: bool

    def _members(self, steps: PassBuilder, name: str, kind: str, stacked: bool) -> list[str]:
        count = len(self.groups)
        if not stacked:
            return [f"{name}.{kind}{i}" for i in range(count)]
        members = tuple([f"{name}.{kind}_of{i}" for i in range(count)])
        steps.steps.append(Step("unbind", (f"{name}.{kind}",), members, count))
        return list(members)

    def _parts(self, steps: PassBuilder, made: str, x: str, rows: str) -> list[str]:
        count = len(self.groups)
        parts = tuple([f"{made}{i}" for i in range(count)])
        steps.steps.append(Step("split", (x, rows), parts, count))
        return list(parts)

    def forward(self, steps: PassBuilder, name: str, x: Value) -> ForwardPart:
        x = steps.matrix(steps.converted(x, self.convert))
        rows = steps.one("split_sizes", (x.name,), f"{name}.rows_of_groups", Named(name, "rows"))
        parts = self._parts(steps, f"{name}.x_of", x.name, rows)
        weights = self._members(steps, name, "weight", self.stacked_weight)
        biases = self._members(steps, name, "bias", self.stacked_bias) if self.bias else []
        scales = []
        if self.scale_bias:
            column = steps.one("to_shape", (f"{name}.extra1",), f"{name}.scales", (-1, 1))
            scales = self._parts(steps, f"{name}.scales_of", column, rows)
        outputs, saved = [], [rows]
        for i, facts in enumerate(self.groups):
            weight = steps.converted(Value(weights[i]), self.convert_weight).name
            part = forward_steps(replace(facts, layer=f"{name}.{i}"), parts[i], weight, None)
            steps.steps += part.steps
            y = part.output
            if self.bias:
                bias = steps.converted(Value(biases[i]), self.convert_bias).name
                if self.scale_bias:
                    y = steps.one("add_scaled_bias", (y, bias, scales[i]), f"{name}.y_of{i}")
                else:
                    y = steps.one("add_bias", (y, bias), f"{name}.y_of{i}")
            outputs.append(y)
            saved += [part.saved_input, part.saved_weight]
        if self.scale_bias:
            saved += [*scales, *biases]
        settings = Named(name, OUTPUT_BUFFER_KEY) if self.output_buffer else None
        op = "concatenate_into" if self.output_buffer else "concatenate"
        steps.steps.append(Step(op, (x.name, *outputs), (f"{name}.y",), settings))
        return ForwardPart(Value(f"{name}.y", x.leading), tuple(saved))

    def backward(self, steps: PassBuilder, name: str, dy: Value, kept: BackwardInputs) -> BackwardPart:
        dy = steps.matrix(dy)
        count = len(self.groups)
        rows = kept.saved[0]
        assert rows is not None
        parts = self._parts(steps, f"{name}.dy_of", dy.name, rows)
        inputs: list[str | None] = []
        weights: list[str | None] = []
        biases: list[str | None] = [None] * count
        grad_scales: list[str] = []
        for i, facts in enumerate(self.groups):
            if self.scale_bias:
                made = (f"{name}.db{i}", f"{name}.dscales{i}")
                scales, bias = kept.saved[1 + 2 * count + i], kept.saved[1 + 3 * count + i]
                steps.steps.append(
                    Step("scaled_bias_backward", (parts[i], bias, scales), made, self.bias_dtype)
                )
                grad_scales.append(made[1])
                biases[i] = made[0]
            elif self.grad_bias:
                biases[i] = steps.one("column_sum", (parts[i],), f"{name}.db{i}", ColumnSum(f"{name}.{i}"))
            saved_input, saved_weight = kept.saved[1 + 2 * i : 3 + 2 * i]
            part = backward_steps(replace(facts, layer=f"{name}.{i}"), parts[i], saved_input, saved_weight)
            steps.steps += part.steps
            inputs.append(part.grad_input)
            weights.append(part.grad_weight)
        grad_input = self._grad_input(steps, name, dy, inputs)
        extra: tuple[Value | None, ...] = (None,)
        if self.scale_bias:
            steps.steps.append(
                Step("concatenate", (dy.name, *grad_scales), (f"{name}.dscales_matrix",), None)
            )
            extra = (
                None,
                Value(steps.one("to_shape", (f"{name}.dscales_matrix",), f"{name}.dscales", (-1,))),
            )
        grads = self._stacked(steps, name, "weight", weights, self.stacked_weight)
        if self.bias:
            if not self.grad_bias:
                biases = [None] * count
            grads += self._stacked(steps, name, "bias", biases, self.stacked_bias)
        return BackwardPart(grad_input, self._in_order(grads), extra)

    def _in_order(self, grads: list[str | None]) -> tuple[str | None, ...]:
        """Return gradients in the order of the parameters: weight0, bias0, weight1, .. unless one kind is stacked."""
        count = len(self.groups)
        if self.bias and self.stacked_weight == self.stacked_bias and not self.stacked_weight:
            pairs = zip(grads[:count], grads[count:], strict=True)
            return tuple([grad for pair in pairs for grad in pair])
        return tuple(grads)

    def _grad_input(self, steps: PassBuilder, name: str, dy: Value, inputs: list[str | None]) -> Value | None:
        if None in inputs:
            return None
        settings = Named(name, GRAD_INPUT_BUFFER_KEY) if self.grad_buffer else None
        op = "concatenate_into" if self.grad_buffer else "concatenate"
        steps.steps.append(Step(op, (dy.name, *inputs), (f"{name}.dx",), settings))
        return steps.converted(Value(f"{name}.dx", dy.leading), self.convert_gradient)

    def _stacked(
        self, steps: PassBuilder, name: str, kind: str, grads: list[str | None], stacked: bool
    ) -> list[str | None]:
        if not stacked:
            return grads
        steps.steps.append(Step("stack", tuple(grads), (f"{name}.d{kind}",), Named(name, f"{kind} gradient")))
        return [f"{name}.d{kind}"]

    def is_plain(self, layer: str) -> bool:
        return self.groups[int(layer.partition(".")[2])].plain if "." in layer else self.groups[0].plain
