"""Passes of a linear layer with a weight per group of rows, as rewrites of the passes of `linear.py`."""

from __future__ import annotations

from collections.abc import Collection

from .step import Pass, Step

GROUPED = "grouped_"  # prefix of the operations that work on all groups of rows in one step
_OVER_GROUPS = frozenset(
    {"cast", "convert", "dequantize", "product", "inspect", "weight_gradient", "column_sum"}
)


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
