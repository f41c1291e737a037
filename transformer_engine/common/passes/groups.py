"""Passes of a linear layer with a weight per group of rows, as rewrites of the passes of `linear.py`."""

from __future__ import annotations

from collections.abc import Collection

from .step import Pass, Step
from .vocabulary import CastSettings, Layer

GROUPED = "grouped_"  # prefix of the operations that work on all groups of rows in one step
_OVER_GROUPS = frozenset(
    {"cast", "convert", "dequantize", "product", "inspect", "weight_gradient", "column_sum"}
)


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
        pass_: The pass, after rules have been applied: rules support the operations of a single layer only.
        layers: Names of the linear layers that have a weight per group.
    """
    steps = [
        Step(GROUPED + step.op, step.inputs, step.results, step.settings)
        if step.op in _OVER_GROUPS and getattr(step.settings, "layer", None) in layers
        else step
        for step in pass_.steps
    ]
    return Pass(pass_.inputs, pass_.results, pass_.saved, tuple(steps))
