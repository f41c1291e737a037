"""Operation settings that both frameworks and their kernels share: cross entropy, Adam and SGD."""

from __future__ import annotations

from typing import NamedTuple

# Elements per program in operations on tensor lists. A program numbers its random bits from its own multiple.
CHUNK = 8192
STATE_BLOCK = 128  # consecutive values of a block-scaled optimizer state that share an exponent


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
        block_scaled: Both moments are FP8 codes with one exponent per `STATE_BLOCK` values.
        stochastic: Round block-scaled moments, and bfloat16 parameters without masters, stochastically.
    """

    decoupled: bool = True
    block_scaled: bool = False
    stochastic: bool = False


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
