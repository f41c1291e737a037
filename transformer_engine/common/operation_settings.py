"""Operation settings that both frameworks and their kernels share: cross entropy, Adam and SGD."""

from __future__ import annotations

from typing import NamedTuple


class Labels(NamedTuple):
    """Cross-entropy labels; the same for all rows.

    Attributes:
        ignored: Label for rows that do not contribute to the loss.
        smoothing: Probability fraction that is distributed evenly over all classes.
        first: Class index for column 0.
        total: Number of classes over all ranks.
    """

    ignored: int
    smoothing: float
    first: int
    total: int


class Adam(NamedTuple):
    """Adam step settings.

    Attributes:
        decoupled: Subtract weight decay from the parameter (AdamW) instead of adding it to the gradient.
    """

    decoupled: bool = True


class Sgd(NamedTuple):
    """Settings for a stochastic gradient descent step.

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
