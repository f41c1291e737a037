"""A layer's training-pass steps as a GPU runs them: kernels, products and collectives over named buffers.

`te plan` computes times and memory of these steps (`simulate.py`). They follow the statements in the layers' plain
functions (`pytorch/functions/linear.py`, `norm_linear.py`) in training, with all gradients and without overrides.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

BEGIN, WAIT = ".begin", ".wait"


@dataclass(frozen=True, slots=True)
class Step:
    """One kernel, product or collective: results = op(inputs).

    Attributes:
        op: Operation name.
        inputs: Buffers that it reads.
        results: Buffers that it computes; None for an absent result.
        layer: Linear layer of a product.
        product: "forward", "grad_input" or "grad_weight" for a product.
        casts: The first two results are the rowwise and columnwise codes of the result.
        multiplies_gradient: The product multiplies dx by GELU's derivative, in the memory of GELU's input.
    """

    op: str
    inputs: tuple[str | None, ...]
    results: tuple[str | None, ...]
    layer: str = ""
    product: Literal["", "forward", "grad_input", "grad_weight"] = ""
    casts: bool = False
    multiplies_gradient: bool = False

    def reads(self) -> tuple[str, ...]:
        """Names of the buffers that the step reads."""
        return tuple([name for name in self.inputs if name is not None])

    def makes(self) -> tuple[str, ...]:
        """Names of the buffers that the step computes."""
        return tuple([name for name in self.results if name is not None])


class Pass(NamedTuple):
    """A forward or backward pass: the buffers that it receives, returns and saves, and its steps.

    Attributes:
        inputs: Names of the received buffers.
        results: Names of the returned buffers; None for an absent result.
        saved: Names of the buffers that stay until the backward pass.
        steps: Steps in execution order.
    """

    inputs: tuple[str, ...]
    results: tuple[str | None, ...]
    saved: tuple[str, ...]
    steps: tuple[Step, ...]

    def buffers_to_free(self) -> tuple[tuple[str, ...], ...]:
        """Of each step, the buffers that no later step reads and that the pass neither returns nor saves."""
        last = {
            name: i for i, step in enumerate(self.steps) for name in (*step.makes(), *step.reads())
        }
        order = [*self.inputs, *[name for step in self.steps for name in step.makes()]]
        retained = {*self.results, *self.saved}
        freed: list[list[str]] = [[] for _ in self.steps]
        for name in order:
            if name in last and name not in retained:
                freed[last[name]].append(name)
        return tuple(map(tuple, freed))


class LinearFacts(NamedTuple):
    """Facts about a linear layer that decide its steps.

    Attributes:
        layer: Layer name, and the prefix for its buffers.
        bias: The product adds a bias.
        mode: None without communication, "column" or "row" for a shard of a tensor-parallel layer.
        plain: Operands are multiplied unquantized.
        sequence: Activations outside the layer are sharded along their first dimension.
        row_codes: Code rows are gathered, and the column direction is their transpose; otherwise each direction's codes
            are gathered.
    """

    layer: str = "linear"
    bias: bool = False
    mode: str | None = None
    plain: bool = False
    sequence: bool = False
    row_codes: bool = False

    @property
    def gathers_input(self) -> bool:
        """Whether the rows of x are sharded over ranks that compute a column-parallel product."""
        return self.mode == "column" and self.sequence

    @property
    def gathers_gradient(self) -> bool:
        """Whether the rows of dy are sharded over ranks that computed a row-parallel product."""
        return self.mode == "row" and self.sequence

    def named(self, buffer: str) -> str:
        """Name for one of the layer's buffers."""
        return f"{self.layer}.{buffer}"

    def codes_of_input(self) -> tuple[str, str | None]:
        """Buffers for x's codes. Rows alone are quantized where columns are made from the gathered rows."""
        rows_only = self.gathers_input and self.row_codes
        return self.named("x_row"), None if rows_only else self.named("x_column")

    def codes_of_gradient(self) -> tuple[str, str | None]:
        """Buffers for dy's codes."""
        rows_only = self.gathers_gradient and self.row_codes
        return self.named("dy_row"), None if rows_only else self.named("dy_column")


class _Forward(NamedTuple):
    steps: list[Step]
    y: str
    saved: tuple[str, str]


def _collective(name: str, x: str, y: str) -> list[Step]:
    """A collective as two steps."""
    return [Step(name + BEGIN, (x,), (f"{y}.pending",)), Step(name + WAIT, (f"{y}.pending",), (y,))]


def _forward(facts: LinearFacts, x: str, prefix: str, quantized: bool = False) -> _Forward:
    """The forward steps from x, weight and bias to y; with `quantized` an earlier step has quantized x."""
    steps: list[Step] = []
    rows, columns = (x, None) if facts.plain else facts.codes_of_input()
    saved_input = x if facts.plain else columns or rows
    if not (facts.plain or quantized):
        steps.append(Step("cast", (x,), (rows, columns), casts=True))
    wait: list[Step] = []
    if facts.gathers_input:
        rows_gathered = facts.named("x_gathered" if facts.plain else "x_row_gathered")
        begin, *wait = _collective("all_gather", rows, rows_gathered)
        steps.append(begin)
        rows = rows_gathered
    if facts.plain:
        weight = saved_weight = facts.named("weight_converted")
        steps.append(Step("convert", (f"{prefix}weight",), (weight,)))
    else:
        weight, saved_weight = facts.named("w_row"), facts.named("w_column")
        steps.append(Step("cast", (f"{prefix}weight",), (weight, saved_weight), casts=True))
    steps += wait
    y = facts.named("y_biased" if facts.bias else "y")
    bias = (f"{prefix}bias",) if facts.bias else ()
    steps.append(Step("product", (rows, weight, *bias), (y,), facts.layer, "forward"))
    if facts.mode == "row":
        summed = facts.named("y_reduced")
        steps += _collective("reduce_scatter" if facts.sequence else "all_reduce", y, summed)
        y = summed
    return _Forward(steps, y, (saved_input, saved_weight))


class _Backward(NamedTuple):
    steps: list[Step]
    dx: str
    dw: str
    db: str | None


def _backward(
    facts: LinearFacts,
    dy: str,
    saved: tuple[str, str],
    computed: bool = False,
    quantized: bool = False,
) -> _Backward:
    """The backward steps from dy and the saved values to dx, dw and db.

    Args:
        facts: The layer.
        dy: Gradient of y.
        saved: Saved x and weight values.
        computed: An earlier step has computed dy, which is contiguous.
        quantized: That step has also computed the codes of dy, and db.
    """
    steps: list[Step] = []
    x, weight = saved
    x_wait: list[Step] = []
    if facts.gathers_input:
        begin, *x_wait = _collective("all_gather", x, facts.named("x_again_gathered"))
        steps.append(begin)
        x = facts.named("x_again_gathered")
        if not facts.plain and facts.row_codes:
            x_wait.append(Step("transpose", (x,), (facts.named("x_column_again"),)))
            x = facts.named("x_column_again")
    if facts.plain and facts.gathers_gradient:
        steps += _collective("all_gather", dy, facts.named("dy_gathered"))
        dy = facts.named("dy_gathered")
    elif not computed:
        steps.append(Step("dense", (dy,), (facts.named("dy"),)))
        dy = facts.named("dy")
    db = facts.named("db") if facts.bias else None
    rows: str = dy
    columns: str | None = dy
    if not facts.plain:
        rows, columns = facts.codes_of_gradient()
    if not quantized:
        codes = () if facts.plain else (rows, columns)
        if db is not None:
            steps.append(Step("column_sum", (dy,), (*codes, db), casts=bool(codes)))
        elif codes:
            steps.append(Step("cast", (dy,), codes, casts=True))
    columns_wait: list[Step] = []
    if facts.gathers_gradient and not facts.plain:
        begin, wait = _collective("all_gather", rows, f"{rows}_gathered")
        steps.append(begin)
        rows = f"{rows}_gathered"
        if columns is None:
            columns = facts.named("dy_column")
            steps += [wait, Step("transpose", (rows,), (columns,))]
        else:
            begin, *columns_wait = _collective("all_gather", columns, f"{columns}_gathered")
            steps += [begin, wait]
            columns = f"{columns}_gathered"
    dx = facts.named("dx")
    steps.append(Step("product", (rows, weight), (dx,), facts.layer, "grad_input"))
    dx_wait: list[Step] = []
    if facts.mode == "column":
        summed = facts.named("dx_reduced")
        begin, *dx_wait = _collective(
            "reduce_scatter" if facts.sequence else "all_reduce", dx, summed
        )
        steps.append(begin)
        dx = summed
    dw = facts.named("dw")
    product = Step("weight_gradient", (columns, x), (dw,), facts.layer, "grad_weight")
    return _Backward([*steps, *columns_wait, *x_wait, product, *dx_wait], dx, dw, db)


def linear_passes(facts: LinearFacts) -> tuple[Pass, Pass]:
    """Both passes for a linear layer."""
    forward = _forward(facts, "x", "")
    backward = _backward(facts, "grad_output", forward.saved)
    inputs = ("x", "weight", *(("bias",) if facts.bias else ()))
    return (
        Pass(inputs, (forward.y,), forward.saved, tuple(forward.steps)),
        Pass(
            ("grad_output", *forward.saved),
            (backward.dx, backward.dw, backward.db),
            (),
            tuple(backward.steps),
        ),
    )


def grouped_passes(facts: LinearFacts) -> tuple[Pass, Pass]:
    """Both passes for a linear layer with one weight per row group."""

    def group_passes(pass_: Pass) -> Pass:
        steps = [
            step if step.op == "dense" else replace(step, op="grouped_" + step.op)
            for step in pass_.steps
        ]
        return pass_._replace(steps=tuple(steps))

    forward, backward = linear_passes(facts)
    return group_passes(forward), group_passes(backward)


def _norm(centered: bool, linear: LinearFacts) -> Step:
    """The norm before a linear layer, which quantizes its output for the layer."""
    read = ("x", "gamma", *(("beta",) if centered else ()))
    output = ("normed",) if linear.plain else linear.codes_of_input()
    return Step(
        "norm", read, (*output, "mean" if centered else None, "rstdev"), casts=not linear.plain
    )


def _norm_backward(centered: bool, dy: str) -> Step:
    read = (dy, "x", "mean" if centered else None, "rstdev", "gamma")
    return Step("norm_backward", read, ("dx", "dgamma", "dbeta" if centered else None))


def norm_linear_passes(facts: LinearFacts, centered: bool) -> tuple[Pass, Pass]:
    """Both passes for a norm and a linear layer; a centered norm subtracts the mean and has a bias."""
    forward = _forward(facts, "normed", "", quantized=not facts.plain)
    backward = _backward(facts, "grad_output", forward.saved)
    beta = ("beta",) if centered else ()
    inputs = ("x", "gamma", *beta, "weight", *(("bias",) if facts.bias else ()))
    saved = ("x", "gamma", *(("mean",) if centered else ()), "rstdev", *forward.saved)
    results = ("dx", "dgamma", "dbeta" if centered else None, backward.dw, backward.db)
    return (
        Pass(inputs, (forward.y, None), saved, (_norm(centered, facts), *forward.steps)),
        Pass(
            ("grad_output", *saved),
            results,
            (),
            (*backward.steps, _norm_backward(centered, backward.dx)),
        ),
    )


def norm_mlp_passes(
    fc1: LinearFacts, fc2: LinearFacts, activation: str, centered: bool, gradient_casts: bool
) -> tuple[Pass, Pass]:
    """Both passes for a norm, two linear layers and the activation between them.

    Args:
        fc1: The first linear layer.
        fc2: The second linear layer.
        activation: Activation name.
        centered: The norm subtracts the mean and has a bias.
        gradient_casts: The gradient of the activation quantizes its result.
    """
    in_product = fc1.plain and activation == "gelu"
    first = _forward(fc1, "normed", "fc1_", quantized=not fc1.plain)
    second = _forward(fc2, "activated", "fc2_", quantized=not fc2.plain)
    steps = [_norm(centered, fc1), *first.steps]
    if in_product:
        steps[-1] = Step("product", steps[-1].inputs, ("activated", first.y), fc1.layer, "forward")
    else:
        codes = ("activated",) if fc2.plain else fc2.codes_of_input()
        steps.append(Step("activation", (first.y,), codes, casts=not fc2.plain))
    back2 = _backward(fc2, "grad_output", second.saved)
    casts = not fc1.plain and gradient_casts
    back1 = _backward(fc1, "grad_fc1_output", first.saved, computed=True, quantized=casts)
    middle: list[Step] = []
    gradient = [*back2.steps]
    if in_product and fc2.mode != "column":
        at = next(i for i, step in enumerate(gradient) if step.product == "grad_input")
        read = (*gradient[at].inputs, None, first.y)
        gradient[at] = Step(
            "product", read, ("grad_fc1_output",), fc2.layer, "grad_input", multiplies_gradient=True
        )
    elif casts:
        results = (*fc1.codes_of_gradient(), *((back1.db,) if fc1.bias else ()))
        middle = [Step("activation_backward", (back2.dx, first.y), results, casts=True)]
    else:
        middle = [Step("activation_backward", (back2.dx, first.y), ("grad_fc1_output",))]
    inputs = ["x", "gamma", *(("beta",) if centered else ())]
    for facts in (fc1, fc2):
        inputs += [f"{facts.layer}_weight", *([f"{facts.layer}_bias"] if facts.bias else [])]
    statistics = ("mean", "rstdev") if centered else ("rstdev",)
    saved = ("x", "gamma", *statistics, first.y, *first.saved, *second.saved)
    results = (
        "dx",
        "dgamma",
        "dbeta" if centered else None,
        back1.dw,
        back1.db,
        back2.dw,
        back2.db,
    )
    backward = (*gradient, *middle, *back1.steps, _norm_backward(centered, back1.dx))
    return (
        Pass(tuple(inputs), (second.y, None), saved, (*steps, *second.steps)),
        Pass(("grad_output", *saved), results, (), backward),
    )
