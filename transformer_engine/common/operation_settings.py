"""Settings of operations that both frameworks and their kernels share: cross entropy, Adam and SGD."""

from __future__ import annotations

from typing import NamedTuple


class Labels(NamedTuple):
    """The labels of a cross entropy; the same for all rows.

    Attributes:
        ignored: Label of rows that do not contribute to the loss.
        smoothing: Fraction of the probability that is distributed evenly over all classes.
        first: Class index of column 0.
        total: Number of classes over all ranks.
    """

    ignored: int
    smoothing: float
    first: int
    total: int


class Adam(NamedTuple):
    """Settings of an Adam step.

    Attributes:
        decoupled: Subtract weight decay from the parameter (AdamW) instead of adding it to the gradient.
    """

    decoupled: bool = True


class Sgd(NamedTuple):
    """Settings of a step of stochastic gradient descent.

    Attributes:
        momentum: Use momentum.
        nesterov: Use Nesterov momentum.
        first: First step: the momentum buffer is the gradient.
        late: Apply weight decay after the momentum.
    """

    momentum: bool = False
    nesterov: bool = False
    first: bool = False
    late: bool = False
