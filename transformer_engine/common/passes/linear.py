"""The passes of a linear layer y [M, N] = x [M, K] @ w [N, K].T + b [N], as steps.

`forward_steps` and `backward_steps` are also the linear part of larger layers; they share names of buffers through a
prefix. A builder emits the plain sequence of operations; rules (`rules.py`) merge them.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from .rules import without_identity_casts
from .step import Pass, Step
from .vocabulary import CastSettings, Collective, ColumnSum, Inspection, Layer, Product

QUANTIZED: Literal["quantized"] = "quantized"
HIGH_PRECISION: Literal["high_precision"] = "high_precision"
DEQUANTIZED: Literal["dequantized"] = "dequantized"

# How a matrix whose rows are sharded over ranks is gathered; see `LinearFacts`.
VALUES: Literal["values"] = "values"
CODES: Literal["codes"] = "codes"
ROW_CODES: Literal["row_codes"] = "row_codes"
ONCE: Literal["once"] = "once"
Gather = Literal["values", "codes", "row_codes", "once"]


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
        gather_input: How x is gathered where its rows are sharded. "values": in high precision; every rank quantizes
            all rows. "codes": each rank quantizes its rows, and the codes of each direction are gathered. "row_codes":
            the same where the column direction is the transpose of the row direction. The backward pass gathers the
            saved shard again. "once": in high precision, and the gathered matrix is saved, because it cannot be
            quantized twice.
        gather_gradient: How the gradient of y is gathered: "values", "codes" or "row_codes".
        inspected: Results that an inspector reads or replaces before they are summed over ranks: "output",
            "grad_input".
        overlaps_gather: Gathers can overlap with the product of their rows.
        overlaps_scatter: Sums over ranks whose rows are scattered can overlap with their product.
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
    gather_input: Gather = VALUES
    gather_gradient: Literal["values", "codes", "row_codes"] = VALUES
    inspected: tuple[str, ...] = ()
    overlaps_gather: bool = False
    overlaps_scatter: bool = False

    @property
    def gathers_input(self) -> bool:
        """Are the rows of x sharded over ranks that compute a column-parallel product?"""
        return self.mode == "column" and self.sequence

    @property
    def gathers_gradient(self) -> bool:
        """Are the rows of the gradient of y sharded over ranks that computed a row-parallel product?"""
        return self.mode == "row" and self.sequence


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
    x_row, saved_x = _input(steps, facts, x)
    if facts.plain:
        steps.append(Step("convert", (weight,), (f"{name}.weight_converted",), Layer(name)))
        weight = f"{name}.weight_converted"
    w_row, w_column = _cast(
        steps, name, "weight", weight, f"{name}.w", facts.grad_input and facts.backward == QUANTIZED
    )
    product = Step("product", (x_row, w_row), (f"{name}.y",), Product(name, "forward"))
    steps.append(product)
    y = f"{name}.y"
    if bias is not None:
        steps.append(Step("add_bias", (y, bias), (f"{name}.y_biased",)))
        y = f"{name}.y_biased"
    if "output" in facts.inspected:
        steps.append(Step("inspect", (y,), (f"{name}.y_inspected",), Inspection(name, "output")))
        y = f"{name}.y_inspected"
    if facts.mode == "row":
        collective = "reduce_scatter" if facts.sequence else "all_reduce"
        y = _communicated(steps, facts, collective, y, f"{name}.y_reduced")
    if facts.quantized_output:
        steps.append(
            Step("quantize", (y,), (f"{name}.y_quantized",), CastSettings(name, "output", True, False))
        )
        y = f"{name}.y_quantized"
    saved_w = w_row if facts.backward == DEQUANTIZED else w_column
    if facts.grad_input and facts.backward == HIGH_PRECISION:
        steps.append(Step("convert", (weight,), (f"{name}.w_values",), Layer(name)))
        saved_w = f"{name}.w_values"
    return LinearForwardSteps(
        tuple(steps), y, saved_x if facts.grad_weight else None, saved_w if facts.grad_input else None
    )


def _input(steps: list[Step], facts: LinearFacts, x: str) -> tuple[str, str | None]:
    """Append the steps that make the input of the product; return its buffer and the saved buffer of x."""
    name = facts.layer
    way = facts.gather_input if facts.gathers_input else None
    shard = x
    if way in (VALUES, ONCE):
        x = _communicated(steps, facts, "all_gather", x, f"{name}.x_gathered")
    values = facts.keep_input or facts.backward == HIGH_PRECISION
    quantized_again = way in (VALUES, ROW_CODES)
    columns = facts.grad_weight and facts.backward == QUANTIZED and not facts.keep_input
    row, column = _cast(steps, name, "input", x, f"{name}.x", columns and not quantized_again)
    saved = row if facts.backward == DEQUANTIZED or way == ROW_CODES else column
    if way in (CODES, ROW_CODES):
        row = _communicated(steps, facts, "all_gather", row, f"{name}.x_row_gathered")
    if way == VALUES:
        saved = shard
    elif values and facts.grad_weight:
        steps.append(Step("dequantize", (x,), (f"{name}.x_values",), Layer(name)))
        saved = f"{name}.x_values"
    return row, saved


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
    if facts.grad_weight and facts.gathers_input and facts.gather_input != ONCE:
        assert saved_input is not None
        saved_input = _gathered_again(steps, facts, saved_input)
    turned = facts.backward != QUANTIZED
    gathers_codes = facts.gathers_gradient and facts.gather_gradient != VALUES and not turned
    if facts.gathers_gradient and not gathers_codes:
        dy = _communicated(steps, facts, "all_gather", dy, f"{name}.dy_gathered", dense=not made_before)
    elif not made_before:
        steps.append(Step("dense", (dy,), (f"{name}.dy",)))
        dy = f"{name}.dy"
    grad_bias = None
    if facts.grad_bias:
        grad_bias = f"{name}.db"
        steps.append(Step("column_sum", (dy,), (grad_bias,), ColumnSum(name)))
    row, column = dy, dy
    if not turned and (facts.grad_input or facts.grad_weight):
        row, column = _gradient_operands(steps, facts, dy, gathers_codes)
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
        if "grad_input" in facts.inspected:
            inspection = Inspection(name, "grad_input")
            steps.append(Step("inspect", (grad_input,), (f"{name}.dx_inspected",), inspection))
            grad_input = f"{name}.dx_inspected"
        if facts.mode == "column":
            collective = "reduce_scatter" if facts.sequence else "all_reduce"
            grad_input = _communicated(steps, facts, collective, grad_input, f"{name}.dx_reduced")
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


def _gradient_operands(steps: list[Step], facts: LinearFacts, dy: str, gathered: bool) -> tuple[str, str]:
    """Append the cast of the gradient of y, and the gathers of its codes; return the buffers of both directions."""
    name = facts.layer
    by_rows = gathered and facts.gather_gradient == ROW_CODES
    names = (
        f"{name}.dy_row" if facts.grad_input or by_rows else None,
        f"{name}.dy_column" if facts.grad_weight and not by_rows else None,
    )
    settings = CastSettings(name, "grad_output", names[0] is not None, names[1] is not None)
    steps.append(Step("cast", (dy,), names, settings))
    row, column = names
    if gathered and row is not None:
        row = _communicated(steps, facts, "all_gather", row, f"{row}_gathered")
    if gathered and column is not None:
        column = _communicated(steps, facts, "all_gather", column, f"{column}_gathered", axis=1)
    if by_rows and facts.grad_weight:
        column = f"{name}.dy_column"
        steps.append(Step("transpose", (row,), (column,)))
    return row or "", column or ""


def _gathered_again(steps: list[Step], facts: LinearFacts, saved: str) -> str:
    """Append the gather of the shard that was saved of x; return the buffer of the gathered matrix."""
    name, way = facts.layer, facts.gather_input
    if facts.backward == QUANTIZED and way != VALUES:
        if facts.keep_input:
            by_rows = way == ROW_CODES
            again = f"{name}.x_again"
            made = (again, None) if by_rows else (None, again)
            steps.append(Step("cast", (saved,), made, CastSettings(name, "input", by_rows, not by_rows)))
            saved = again
        return _communicated(
            steps, facts, "all_gather", saved, f"{name}.x_again_gathered", axis=int(way == CODES)
        )
    return _communicated(steps, facts, "all_gather", saved, f"{name}.x_again_gathered")


def _saved_input(steps: list[Step], facts: LinearFacts, saved: str) -> str:
    """Return the buffer that the weight gradient reads, of the saved buffer of x or of its gathered shards."""
    name = facts.layer
    way = facts.gather_input if facts.gathers_input and facts.gather_input != ONCE else None
    kept = facts.keep_input or facts.backward == HIGH_PRECISION
    if kept and way == VALUES:
        saved = _values(steps, facts, saved, f"{name}.x_values_again")
    if facts.backward != QUANTIZED:
        if kept:
            return saved
        if way == VALUES:
            saved, _ = _cast(steps, name, "input", saved, f"{name}.x_again", False)
        return _values(steps, facts, saved, f"{name}.x_read")
    made = f"{name}.x_column_again"
    if way == ROW_CODES:
        steps.append(Step("transpose", (saved,), (made,)))
    elif way == VALUES or (kept and way is None):
        steps.append(Step("cast", (saved,), (None, made), CastSettings(name, "input", False, True)))
    else:
        return saved
    return made


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


def _communicated(
    steps: list[Step],
    facts: LinearFacts,
    collective: str,
    read: str,
    made: str,
    axis: int = 0,
    dense: bool = False,
) -> str:
    """Append both halves of a collective and return the buffer of its result."""
    overlaps = not axis and (facts.overlaps_gather if collective == "all_gather" else facts.overlaps_scatter)
    pending, settings = f"{made}.pending", Collective(facts.layer, axis, dense, overlaps)
    steps.append(Step(f"{collective}.begin", (read,), (pending,), settings))
    steps.append(Step(f"{collective}.wait", (pending,), (made,), settings))
    return made
