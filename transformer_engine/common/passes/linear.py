"""The passes of a linear layer y [M, N] = x [M, K] @ w [N, K].T + b [N], as steps.

`forward_steps` and `backward_steps` are also the linear part of larger layers; they share names of buffers through a
prefix. A builder emits the plain sequence of operations; rules (`rules.py`) merge them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, NamedTuple

from .rules import without_identity_casts
from .step import Pass, Step
from .vocabulary import CastSettings, Collective, ColumnSum, Layer, Product

QUANTIZED: Literal["quantized"] = "quantized"
HIGH_PRECISION: Literal["high_precision"] = "high_precision"
DEQUANTIZED: Literal["dequantized"] = "dequantized"

GROUPED = "grouped_"  # prefix of the operations that work on all groups of rows in one step
_OVER_GROUPS = frozenset({"cast", "convert", "dequantize", "product", "weight_gradient", "column_sum"})


class LinearFacts(NamedTuple):
    """The facts of a linear layer that decide its steps; also the key by which its passes are cached.

    Attributes:
        layer: Name of the layer in the executor's environment, and the prefix of its buffers.
        bias: The product adds a bias.
        grad_input: The gradient of x is needed.
        grad_weight: The gradient of the weight is needed.
        grad_bias: The gradient of the bias is needed.
        mode: None without communication, "column" or "row" for a shard of a tensor-parallel layer.
        plain: Input, weight and gradients are multiplied unquantized.
        backward: "quantized", "high_precision" or "dequantized": the operands of the backward products.
        keep_input: Save the unquantized input and quantize it again in the backward pass.
        sequence: Activations outside of the layer are sharded along their first dimension.
        quantized_output: y is returned quantized.
        quantized_grad_input: The gradient of x is returned quantized.
    """

    layer: str = "linear"
    bias: bool = False
    mode: str | None = None
    grad_input: bool = True
    grad_weight: bool = True
    backward: Literal["quantized", "high_precision", "dequantized"] = QUANTIZED
    grad_bias: bool = False
    plain: bool = False
    keep_input: bool = False
    sequence: bool = False
    quantized_output: bool = False
    quantized_grad_input: bool = False


class LinearForwardSteps(NamedTuple):
    """Steps of a forward pass: the buffer of the output, and the saved buffers of input and weight."""

    steps: tuple[Step, ...]
    output: str
    saved_input: str | None
    saved_weight: str | None


class LinearBackwardSteps(NamedTuple):
    """Steps of a backward pass and the buffers of its gradients; None for a gradient that is not needed."""

    steps: tuple[Step, ...]
    grad_input: str | None
    grad_weight: str | None
    grad_bias: str | None


def linear_passes(facts: LinearFacts) -> tuple[Pass, Pass]:
    """Return the forward and the backward pass of a linear layer, before rules are applied.

    The forward pass takes x, weight and, with a bias, bias; it returns y. The backward pass takes grad_output and the
    saved buffers; it returns the gradients of x, weight and bias.
    """
    inputs = ("x", "weight", "bias") if facts.bias else ("x", "weight")
    part = forward_steps(facts, "x", "weight", "bias" if facts.bias else None)
    forward = Pass(inputs, (part.output,), (part.saved_input, part.saved_weight), part.steps)
    back = backward_steps(facts, "grad_output", part.saved_input, part.saved_weight)
    results = (back.grad_input, back.grad_weight, back.grad_bias)
    return joined(forward, ("grad_output",), results, back.steps, (facts,))


def joined(
    forward: Pass,
    gradients: tuple[str, ...],
    results: tuple[str | None, ...],
    steps: tuple[Step, ...],
    linears: tuple[LinearFacts, ...],
) -> tuple[Pass, Pass]:
    """Return a forward pass and its backward pass, without the casts of plain layers.

    Args:
        forward: The forward pass.
        gradients: Buffers of the output gradients.
        results: Buffers of the gradients that the backward pass returns.
        steps: Its steps, which read `gradients` and the saved buffers of `forward`.
        linears: The linear layers.
    """
    plain = {facts.layer for facts in linears if facts.plain}
    read = without_identity_casts(forward, lambda cast: cast.layer in plain)
    # A plain layer saves the matrix itself; its backward reads the matrix by columns where it read a column operand.
    columns = [
        Step("cast", (kept,), (None, name), CastSettings(next(iter(plain)), "", False, True))
        for name, kept in zip(forward.saved, read.saved, strict=True)
        if name is not None and name != kept
    ]
    saved = tuple(dict.fromkeys([name for name in read.saved if name is not None]))
    forward = Pass(read.inputs, read.results, saved, read.steps)
    backward = Pass((*gradients, *saved), results, (), (*columns, *steps))
    return forward, without_identity_casts(backward, lambda cast: cast.layer in plain)


def forward_steps(facts: LinearFacts, x: str, weight: str, bias: str | None) -> LinearForwardSteps:
    """Return the steps from the buffers x, weight and bias to y, and the buffers that they save."""
    steps: list[Step] = []
    name = facts.layer
    if facts.mode == "column" and facts.sequence:
        x = _communicated(steps, "all_gather", name, x, f"{name}.x_gathered")
    if facts.plain:
        steps.append(Step("convert", (weight,), (f"{name}.weight_converted",), Layer(name)))
        weight = f"{name}.weight_converted"
    quantized = facts.backward == QUANTIZED
    x_columns = facts.grad_weight and quantized and not facts.keep_input
    x_row, x_column = _cast(steps, name, "input", x, f"{name}.x", x_columns)
    w_row, w_column = _cast(steps, name, "weight", weight, f"{name}.w", facts.grad_input and quantized)
    product = Step("product", (x_row, w_row), (f"{name}.y",), Product(name, "forward"))
    steps.append(product)
    y = f"{name}.y"
    if bias is not None:
        steps.append(Step("add_bias", (y, bias), (f"{name}.y_biased",)))
        y = f"{name}.y_biased"
    if facts.mode == "row":
        y = _communicated(steps, _reduction(facts), name, y, f"{name}.y_reduced")
    if facts.quantized_output:
        steps.append(
            Step("quantize", (y,), (f"{name}.y_quantized",), CastSettings(name, "output", True, False))
        )
        y = f"{name}.y_quantized"
    saved_x, saved_w = x_column, w_column
    if facts.backward == DEQUANTIZED:
        saved_x, saved_w = x_row, w_row
    if facts.grad_weight and (facts.keep_input or facts.backward == HIGH_PRECISION):
        steps.append(Step("dequantize", (x,), (f"{name}.x_values",), Layer(name)))
        saved_x = f"{name}.x_values"
    if facts.grad_input and facts.backward == HIGH_PRECISION:
        steps.append(Step("convert", (weight,), (f"{name}.w_values",), Layer(name)))
        saved_w = f"{name}.w_values"
    return LinearForwardSteps(
        tuple(steps), y, saved_x if facts.grad_weight else None, saved_w if facts.grad_input else None
    )


def backward_steps(
    facts: LinearFacts,
    grad_output: str,
    saved_input: str | None,
    saved_weight: str | None,
    made_before: bool = False,
) -> LinearBackwardSteps:
    """Return the steps from the output gradient and the saved buffers to the three gradients.

    Args:
        facts: Facts of the layer.
        grad_output: Buffer of the output gradient.
        saved_input: Buffer that the forward pass saved of the input.
        saved_weight: Buffer that it saved of the weight.
        made_before: An earlier step makes the output gradient, which is contiguous then. Autograd's may have any
            strides, or be quantized.
    """
    steps: list[Step] = []
    name, dy = facts.layer, grad_output
    if facts.mode == "row" and facts.sequence:
        dy = _communicated(steps, "all_gather", name, dy, f"{name}.dy_gathered")
    if not made_before:
        steps.append(Step("dense", (dy,), (f"{name}.dy",)))
        dy = f"{name}.dy"
    grad_bias = None
    if facts.grad_bias:
        grad_bias = f"{name}.db"
        steps.append(Step("column_sum", (dy,), (grad_bias,), ColumnSum(name)))
    turned = facts.backward != QUANTIZED
    row, column = dy, dy
    if not turned and (facts.grad_input or facts.grad_weight):
        names = (
            f"{name}.dy_row" if facts.grad_input else None,
            f"{name}.dy_column" if facts.grad_weight else None,
        )
        steps.append(
            Step("cast", (dy,), names, CastSettings(name, "grad_output", facts.grad_input, facts.grad_weight))
        )
        row, column = names[0] or "", names[1] or ""
    grad_input = grad_weight = None
    if facts.grad_input:
        assert saved_weight is not None
        w = (
            _values(steps, facts, saved_weight, f"{name}.w_read")
            if facts.backward == DEQUANTIZED
            else saved_weight
        )
        settings = Product(name, "grad_input", (False, turned))
        steps.append(Step("product", (row, w), (f"{name}.dx",), settings))
        grad_input = f"{name}.dx"
        if facts.mode == "column":
            grad_input = _communicated(steps, _reduction(facts), name, grad_input, f"{name}.dx_reduced")
        if facts.quantized_grad_input:
            cast = CastSettings(name, "grad_input", True, False)
            steps.append(Step("quantize", (grad_input,), (f"{name}.dx_quantized",), cast))
            grad_input = f"{name}.dx_quantized"
    if facts.grad_weight:
        assert saved_input is not None
        x = _saved_input(steps, facts, saved_input)
        settings = Product(name, "grad_weight", (turned, turned))
        steps.append(Step("weight_gradient", (column, x), (f"{name}.dw",), settings))
        grad_weight = f"{name}.dw"
    return LinearBackwardSteps(tuple(steps), grad_input, grad_weight, grad_bias)


def _saved_input(steps: list[Step], facts: LinearFacts, saved: str) -> str:
    """Return the buffer of x that the weight gradient reads."""
    name = facts.layer
    if facts.keep_input and facts.backward == QUANTIZED:
        steps.append(
            Step("cast", (saved,), (None, f"{name}.x_again"), CastSettings(name, "input", False, True))
        )
        return f"{name}.x_again"
    if facts.backward == DEQUANTIZED and not facts.keep_input:
        return _values(steps, facts, saved, f"{name}.x_read")
    return saved


def _values(steps: list[Step], facts: LinearFacts, saved: str, made: str) -> str:
    steps.append(Step("dequantize", (saved,), (made,), Layer(facts.layer)))
    return made


def _cast(
    steps: list[Step], layer: str, tensor: str, read: str, made: str, columnwise: bool
) -> tuple[str, str | None]:
    """Append the cast of a forward operand, whose rowwise direction the product reads."""
    row, column = f"{made}_row", f"{made}_column" if columnwise else None
    steps.append(Step("cast", (read,), (row, column), CastSettings(layer, tensor, True, columnwise)))
    return row, column


def _reduction(facts: LinearFacts) -> str:
    return "reduce_scatter" if facts.sequence else "all_reduce"


def _communicated(steps: list[Step], collective: str, layer: str, read: str, made: str) -> str:
    """Append both halves of a collective and return the buffer of its result."""
    pending, settings = f"{made}.pending", Collective(layer)
    steps.append(Step(f"{collective}.begin", (read,), (pending,), settings))
    steps.append(Step(f"{collective}.wait", (pending,), (made,), settings))
    return made


def saving_trained_groups(forward: Pass, layer: str) -> Pass:
    """Return a forward pass over groups that saves no input codes of groups whose weights are frozen.

    A pass saves the codes that its product reads, of all groups, if the backward pass multiplies dequantized values.
    Codes that are made for the backward pass alone are not made for frozen weights.

    Args:
        forward: The pass, after `over_groups`.
        layer: Name of the linear layer that has a weight per group.
    """
    cast = CastSettings(layer, "input", True, False)
    (codes,) = [step.results[0] for step in forward.steps if step.settings == cast] or (None,)
    if codes is None or codes not in forward.saved:
        return forward
    kept = f"{layer}.x_trained"
    steps = (*forward.steps, Step(f"{GROUPED}trained", (codes,), (kept,), Layer(layer)))
    saved = tuple([kept if name == codes else name for name in forward.saved])
    return Pass(forward.inputs, forward.results, saved, steps)


def over_groups(pass_: Pass, layers: Collection[str]) -> Pass:
    """Return a pass in which the operations of some linear layers work on groups of rows.

    Computes y_g [M_g, N] = x_g [M_g, K] @ w_g [N, K].T + b_g for every group g. A matrix of rows holds the rows of all
    groups one after another; a buffer of weights, biases or operands holds one value per group. The executor chooses
    one launch for all groups or a loop over them.

    Args:
        pass_: The pass, after rules have been applied: rules know the operations of a single layer only.
        layers: Names of the linear layers that have a weight per group.
    """
    steps = [
        Step(GROUPED + step.op, step.inputs, step.results, step.settings)
        if step.op in _OVER_GROUPS and getattr(step.settings, "layer", None) in layers
        else step
        for step in pass_.steps
    ]
    return Pass(pass_.inputs, pass_.results, pass_.saved, tuple(steps))
