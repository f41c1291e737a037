"""The passes of norms before linear layers: y = norm(x) @ w.T + b, and y = act(norm(x) @ w1.T + b1) @ w2.T + b2."""

from __future__ import annotations

from dataclasses import dataclass

from .linear import LinearFacts, backward_steps, forward_steps, joined
from .step import Pass, Step
from .vocabulary import Activation, NormSettings

NORM, ACTIVATION = "norm", "activation"


@dataclass(frozen=True, slots=True)
class NormFacts:
    """The facts of a norm before a linear layer.

    Attributes:
        beta: The norm has an additive parameter.
        centered: The norm subtracts the mean, which its backward pass reads.
        returned: The layer also returns the norm's output.
    """

    beta: bool
    centered: bool
    returned: bool


def norm_linear_passes(norm: NormFacts, linear: LinearFacts) -> tuple[Pass, Pass]:
    """Return the forward and the backward pass of a norm and a linear layer, before rules are applied.

    The forward pass takes x, gamma, beta (if any), weight and bias (if any); it returns y and, if requested, norm(x).
    The backward pass takes the gradients of these and the saved buffers; it returns the gradients of x, gamma, beta,
    weight and bias, None for a gradient that is not needed.
    """
    inputs = ("x", "gamma", *(("beta",) if norm.beta else ()), "weight", *(("bias",) if linear.bias else ()))
    part = forward_steps(linear, "normed", "weight", "bias" if linear.bias else None)
    statistics = ("mean" if norm.centered else None, "rstdev")
    before = _norm_steps(norm)
    back = backward_steps(linear, "grad_output", part.saved_input, part.saved_weight)
    after, results = _norm_backward_steps(norm, back.grad_input)
    kept = ("x", "gamma", *statistics) if after else ()
    forward = Pass(
        inputs,
        (part.output, "normed" if norm.returned else None),
        (*kept, part.saved_input, part.saved_weight),
        (*before, *part.steps),
    )
    gradients = ("grad_output", "grad_normed") if norm.returned else ("grad_output",)
    gradients_of_linear = (back.grad_weight, back.grad_bias)
    return joined(forward, gradients, (*results, *gradients_of_linear), (*back.steps, *after), (linear,))


def norm_mlp_passes(norm: NormFacts, fc1: LinearFacts, fc2: LinearFacts, kind: str) -> tuple[Pass, Pass]:
    """Return the forward and the backward pass of a norm, two linear layers and the activation between them.

    Args:
        norm: Facts of the norm.
        fc1: Facts of the first linear layer, whose name is "fc1".
        fc2: Facts of the second linear layer, whose name is "fc2".
        kind: Name of the activation.

    Returns:
        The passes before rules are applied. The forward pass takes x, gamma, beta, fc1_weight, fc1_bias, fc2_weight
        and fc2_bias without absent ones; it returns y and, if requested, norm(x). The backward pass takes the gradients
        of these and the saved buffers; it returns the gradients of all inputs, None for a gradient that is not needed.
    """
    inputs = ["x", "gamma", *(("beta",) if norm.beta else ())]
    for facts in (fc1, fc2):
        inputs += [f"{facts.layer}_weight", *([f"{facts.layer}_bias"] if facts.bias else [])]
    first = forward_steps(fc1, "normed", "fc1_weight", "fc1_bias" if fc1.bias else None)
    activation = Activation(ACTIVATION, kind)
    second = forward_steps(fc2, "activated", "fc2_weight", "fc2_bias" if fc2.bias else None)
    statistics = ("mean" if norm.centered else None, "rstdev")
    saved = (first.saved_input, first.saved_weight, second.saved_input, second.saved_weight)
    forward = Pass(
        tuple(inputs),
        (second.output, "normed" if norm.returned else None),
        ("x", "gamma", *statistics, first.output, *saved),
        (
            *_norm_steps(norm),
            *first.steps,
            Step("activation", (first.output,), ("activated",), activation),
            *second.steps,
        ),
    )
    back2 = backward_steps(fc2, "grad_output", second.saved_input, second.saved_weight)
    middle = Step("activation_backward", (back2.grad_input, first.output), ("grad_fc1_output",), activation)
    back1 = backward_steps(fc1, "grad_fc1_output", first.saved_input, first.saved_weight, made_before=True)
    after, results = _norm_backward_steps(norm, back1.grad_input)
    of_linears = (back1.grad_weight, back1.grad_bias, back2.grad_weight, back2.grad_bias)
    gradients = ("grad_output", "grad_normed") if norm.returned else ("grad_output",)
    steps = (*back2.steps, middle, *back1.steps, *after)
    return joined(forward, gradients, (*results, *of_linears), steps, (fc1, fc2))


def _norm_steps(norm: NormFacts) -> tuple[Step, ...]:
    read = ("x", "gamma", "beta") if norm.beta else ("x", "gamma")
    return (Step("norm", read, ("normed", "mean" if norm.centered else None, "rstdev"), NormSettings(NORM)),)


def _norm_backward_steps(
    norm: NormFacts, grad_input: str | None
) -> tuple[tuple[Step, ...], tuple[str | None, str | None, str | None]]:
    """Return the steps behind the linear layer and the gradients of x, gamma and beta.

    There are none where nothing before the linear layer is trained.
    """
    steps: list[Step] = []
    dy = grad_input
    if norm.returned:
        dy = "grad_normed"
        if grad_input is not None:
            steps.append(Step("add", (grad_input, "grad_normed"), ("grad_sum",)))
            dy = "grad_sum"
    if dy is None:
        return (), (None, None, None)
    read = (dy, "x", "mean" if norm.centered else None, "rstdev", "gamma")
    made = ("dx", "dgamma", "dbeta" if norm.beta else None)
    steps.append(Step("norm_backward", read, made, NormSettings(NORM)))
    return tuple(steps), made
