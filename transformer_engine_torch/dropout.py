"""Dropout under the names of the extension; the mask has one bit an element, uint8 [ceil(elements / 8)]."""

from __future__ import annotations

from torch import Tensor

from transformer_engine.common.checks import number
from transformer_engine.pytorch.primitives.dropout import dropout_backward, dropout_forward
from transformer_engine.pytorch.runtime.checks import tensor

from .checks import output_or_none, values


def dropout_fwd(input: Tensor, dropout_probability: float, out: Tensor | None = None) -> list[Tensor]:
    """[y, mask]: y = input / (1 - p) where an element is kept, else 0."""
    _check(dropout_probability, input=input)
    output_or_none("out", out, input)
    return list(dropout_forward(input, dropout_probability, out=out))


def dropout_bwd(
    grad_output: Tensor, mask: Tensor, dropout_probability: float, grad_input: Tensor | None = None
) -> Tensor:
    """The gradient of dropout_fwd's input, for its mask."""
    _check(dropout_probability, grad_output=grad_output)
    tensor("mask", mask)
    output_or_none("grad_input", grad_input, grad_output)
    return dropout_backward(grad_output, mask, dropout_probability, out=grad_input)


def _check(dropout_probability: float, **operands: Tensor) -> None:
    number("dropout_probability", dropout_probability)
    if not 0.0 <= dropout_probability <= 1.0:
        raise ValueError(
            f"dropout_probability={dropout_probability} is outside 0 .. 1; give the share of elements to drop"
        )
    values(**operands)
