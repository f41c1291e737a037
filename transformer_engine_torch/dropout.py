"""Dropout under the names of the extension; the mask has one bit an element, uint8 [ceil(elements / 8)]."""

from __future__ import annotations

from torch import Tensor

from transformer_engine.pytorch.primitives.dropout import dropout_backward, dropout_forward


def dropout_fwd(input: Tensor, dropout_probability: float, out: Tensor | None = None) -> list[Tensor]:
    """[y, mask]: y = input / (1 - p) where an element is kept, else 0."""
    return list(dropout_forward(input, dropout_probability, out=out))


def dropout_bwd(
    grad_output: Tensor, mask: Tensor, dropout_probability: float, grad_input: Tensor | None = None
) -> Tensor:
    """The gradient of dropout_fwd's input, for its mask."""
    return dropout_backward(grad_output, mask, dropout_probability, out=grad_input)
