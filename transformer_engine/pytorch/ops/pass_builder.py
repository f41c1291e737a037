"""How operations contribute to a pass: values between operations, the builder of steps, and contributions.

A contribution is a frozen record of facts about one operation in one kind of call. It appends the operation's steps to
a forward and to a backward pass. Passes are cached by the contributions of a chain, so a contribution never holds a
tensor; objects that steps need at run time (quantizers, groups, parameters of activations) are in the
`ChainEnvironment` under the operation's name.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch

from ...common.passes.step import Step


class Value(NamedTuple):
    """A value between two operations.

    Attributes:
        name: Buffer of the pass.
        leading: Buffer of the dimensions in place of M, if `name` holds a matrix [M, N]; None for a tensor in its own
            shape.
        quantized: The buffer holds a quantized tensor.
    """

    name: str
    leading: str | None = None
    quantized: bool = False


@dataclass(eq=False)
class PassBuilder:
    """Collects the steps of one pass.

    Args:
        mark: Suffix of derived buffers, which distinguishes those of a backward pass from saved ones.
    """

    mark: str = ""
    # Buffers of extra outputs, which later steps may not write in place.
    shared: set[str] = field(default_factory=set, init=False)
    steps: list[Step] = field(default_factory=list, init=False)
    _made: dict[tuple[str, str, Hashable], str] = field(default_factory=dict, init=False)

    def one(self, op: str, inputs: tuple[str | None, ...], result: str, settings: Hashable = None) -> str:
        """Append a step with one result and return the result's name."""
        self.steps.append(Step(op, inputs, (result,), settings))
        return result

    def _once(self, op: str, source: str, settings: Hashable = None) -> str:
        """Return the result of op(source), which is computed at the first request."""
        key = (op, source, settings)
        if key not in self._made:
            suffix = "" if settings is None else f".{len(self._made)}"
            self._made[key] = self.one(op, (source,), f"{source}.{op}{suffix}{self.mark}", settings)
        return self._made[key]

    def values(self, value: Value) -> Value:
        """Return the value unquantized."""
        return Value(self._once("values", value.name), value.leading) if value.quantized else value

    def leading(self, value: Value) -> str:
        """Return the buffer of the dimensions before the last."""
        return value.leading or self._once("leading", value.name)

    def matrix(self, value: Value) -> Value:
        """Return the value unquantized as a matrix [M, N]."""
        value = self.values(value)
        if value.leading is not None:
            return value
        return Value(self._once("rows", value.name), self.leading(value))

    def rows(self, name: str, width: int | None = None) -> str:
        """Return a buffer that holds a tensor as a matrix."""
        return self._once("rows", name, width)

    def shaped(self, value: Value) -> Value:
        """Return the value unquantized in its own shape."""
        value = self.values(value)
        if value.leading is None:
            return value
        name = f"{value.name}.shaped{self.mark}"
        if not any(step.results == (name,) for step in self.steps):
            self.one("unflatten", (value.name, value.leading), name)
        return Value(name)

    def converted(self, value: Value, dtype: torch.dtype | None) -> Value:
        """Return the value in a dtype; None leaves it unchanged."""
        if dtype is None:
            return value
        value = self.values(value)
        return Value(self._once("to_dtype", value.name, dtype), value.leading)


class ForwardPart(NamedTuple):
    """Results of an operation's part of a forward pass.

    Attributes:
        output: The main output.
        saved: Buffers that the backward pass reads, by position.
        extra_outputs: The extra outputs.
    """

    output: Value
    saved: tuple[str | None, ...] = ()
    extra_outputs: tuple[Value, ...] = ()


class BackwardPart(NamedTuple):
    """Results of an operation's part of a backward pass.

    Attributes:
        grad_input: Gradient of the main input; None if it is not needed.
        grad_parameters: Buffers of the gradients of the parameters, in the order of `parameters()`.
        grad_extra_inputs: Gradients of the extra inputs.
    """

    grad_input: Value | None
    grad_parameters: tuple[str | None, ...] = ()
    grad_extra_inputs: tuple[Value | None, ...] = ()


class BackwardInputs(NamedTuple):
    """Inputs of an operation's part of a backward pass, apart from the gradient of its output.

    Attributes:
        saved: Buffers that its part of the forward pass saved, by position.
        grad_extra_outputs: Gradients of its extra outputs; None if absent.
    """

    saved: tuple[str | None, ...]
    grad_extra_outputs: tuple[Value | None, ...]


@dataclass(frozen=True)
class Contribution:
    """The steps of one operation in one kind of call.

    Parameters of the operation are the buffers "{name}.{parameter}" of a forward pass, extra inputs "{name}.extra{i}".
    The base class is the identity.

    Attributes:
        records: Classes of the frozen records in fields of contributions, by name.
        over_groups: The linear layer of the operation has a weight per group of rows.
    """

    records: ClassVar[dict[str, type]] = {}
    over_groups: ClassVar[bool] = False

    def forward(self, steps: PassBuilder, name: str, x: Value) -> ForwardPart:
        """Append the steps of the forward pass."""
        return ForwardPart(x)

    def backward(self, steps: PassBuilder, name: str, dy: Value, kept: BackwardInputs) -> BackwardPart:
        """Append the steps of the backward pass, which reads what `kept` names."""
        return BackwardPart(dy)

    def is_plain(self, layer: str) -> bool:
        """Return whether the casts of one of the operation's linear layers leave matrices unchanged."""
        return False

    def takes_codes(self, tensor: str, producer: Step, sums: bool) -> bool:
        """Return whether the kernel that makes a matrix may quantize it for this operation.

        Args:
            tensor: "input" or "grad_output".
            producer: The step that makes the matrix.
            sums: Column sums of the matrix are made in the same step.
        """
        return False
