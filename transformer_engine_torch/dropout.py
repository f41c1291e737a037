"""Dropout under the extension's names; the mask has one bit per element, uint8 [ceil(elements / 8)]."""

from __future__ import annotations

from torch import Tensor

from transformer_engine.common.numbers import to_float
from transformer_engine.pytorch.primitives.dropout import dropout_backward, dropout_forward
from transformer_engine.pytorch.runtime.checks import tensor

from .checks import output_or_none, values


def dropout_fwd(input: Tensor, dropout_probability: float, out: Tensor | None = None) -> list[Tensor]:
    """Return [y, mask] with y = input / (1 - p) where an element is kept, and 0 elsewhere."""
    p = _probability(dropout_probability)
    values(input=input)
    output_or_none("out", out, input)
    return list(dropout_forward(input, p, out=out))


def dropout_bwd(
    grad_output: Tensor, mask: Tensor, dropout_probability: float, grad_input: Tensor | None = None
) -> Tensor:
    """Return the gradient of the input of `dropout_fwd`, for its mask."""
    p = _probability(dropout_probability)
    values(grad_output=grad_output)
    tensor("mask", mask)
    output_or_none("grad_input", grad_input, grad_output)
    return dropout_backward(grad_output, mask, p, out=grad_input)


def _probability(given: float) -> float:
    p = to_float("dropout_probability", given)
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout_probability={p} is outside 0 .. 1; give the share of elements to drop")
    return p
