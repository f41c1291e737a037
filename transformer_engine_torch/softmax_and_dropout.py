"""Softmax on scaled attention logits (unmasked, masked or causal) and dropout, under the extension's names.

The dropout mask has one bit per element, uint8 [ceil(elements / 8)].
"""

from __future__ import annotations

from torch import Tensor

from transformer_engine.common.checks import number
from transformer_engine.common.numbers import to_float
from transformer_engine.pytorch.primitives.dropout import dropout_backward, dropout_forward
from transformer_engine.pytorch.primitives.softmax import (
    scaled_softmax_backward as softmax_backward,
)
from transformer_engine.pytorch.primitives.softmax import scaled_softmax_forward as softmax_forward
from transformer_engine.pytorch.runtime.checks import floating, same_shape, tensor

from .checks import output_or_none, values

__all__ = [
    "dropout_bwd",
    "dropout_fwd",
    "scaled_aligned_causal_masked_softmax_backward",
    "scaled_aligned_causal_masked_softmax_forward",
    "scaled_masked_softmax_backward",
    "scaled_masked_softmax_forward",
    "scaled_softmax_backward",
    "scaled_softmax_forward",
    "scaled_upper_triang_masked_softmax_backward",
    "scaled_upper_triang_masked_softmax_forward",
]


def scaled_softmax_forward(input: Tensor, scale_factor: float) -> Tensor:
    """Return softmax(scale_factor * input) [b, h, q, k] over the keys."""
    scale = _scale(scale_factor, input=input)
    return softmax_forward(input, scale)


def scaled_softmax_backward(
    output_grad: Tensor, softmax_results: Tensor, scale_factor: float
) -> Tensor:
    """Compute the logit gradient scale * y * (dy - sum(dy * y))."""
    scale = _scale(scale_factor, output_grad=output_grad, softmax_results=softmax_results)
    return softmax_backward(output_grad, softmax_results, scale)


def scaled_masked_softmax_forward(input: Tensor, mask: Tensor, scale_factor: float) -> Tensor:
    """Return softmax(scale_factor * input) [b, h, q, k] over the keys that the mask does not hide."""
    scale = _scale(scale_factor, input=input)
    tensor("mask", mask)
    return softmax_forward(input, scale, mask=mask)


def scaled_masked_softmax_backward(
    output_grad: Tensor, softmax_results: Tensor, scale_factor: float
) -> Tensor:
    """Compute the logit gradient as `scaled_softmax_backward`; it is 0 where the mask hides a key."""
    scale = _scale(scale_factor, output_grad=output_grad, softmax_results=softmax_results)
    return softmax_backward(output_grad, softmax_results, scale)


def scaled_upper_triang_masked_softmax_forward(input: Tensor, scale_factor: float) -> Tensor:
    """Compute softmax(scale_factor * input) [b h, s, s] for query i over the keys 0 to i."""
    scale = _scale(scale_factor, input=input)
    return softmax_forward(input, scale, causal="top_left")


def scaled_upper_triang_masked_softmax_backward(
    output_grads: Tensor, softmax_results: Tensor, scale_factor: float
) -> Tensor:
    """Return the gradient of the logits as `scaled_softmax_backward`; it is 0 above the diagonal."""
    scale = _scale(scale_factor, output_grads=output_grads, softmax_results=softmax_results)
    return softmax_backward(output_grads, softmax_results, scale, causal="top_left")


def scaled_aligned_causal_masked_softmax_forward(input: Tensor, scale_factor: float) -> Tensor:
    """Return the causal softmax [b, h, q, k] whose diagonal ends in the last query and the last key."""
    scale = _scale(scale_factor, input=input)
    return softmax_forward(input, scale, causal="bottom_right")


def scaled_aligned_causal_masked_softmax_backward(
    output_grad: Tensor, softmax_results: Tensor, scale_factor: float
) -> Tensor:
    """Return the gradient of the logits as `scaled_softmax_backward`; it is 0 above the diagonal."""
    scale = _scale(scale_factor, output_grad=output_grad, softmax_results=softmax_results)
    return softmax_backward(output_grad, softmax_results, scale, causal="bottom_right")


def _scale(scale_factor: float, **scores: Tensor) -> float:
    """Return the factor as a float.

    Raises:
        TypeError: The factor is not a number, or scores are not floating-point tensors.
        ValueError: The factor is not finite, or scores have too few axes or different shapes.
    """
    scale = to_float("scale_factor", scale_factor)
    number("scale_factor", scale)
    first = next(iter(scores.values()))
    for name, value in scores.items():
        floating(name, value)
        if value.dim() < 2:
            raise ValueError(f"{name} is {list(value.shape)}; give scores [.., queries, keys]")
        if value is not first:
            same_shape(name, value, "its gradient", first)
    return scale


def dropout_fwd(
    input: Tensor, dropout_probability: float, out: Tensor | None = None
) -> list[Tensor]:
    """Return [y, mask] with y = input / (1 - p) where an element is kept, and 0 elsewhere.

    Args:
        input: Values in any shape, in a floating-point dtype.
        dropout_probability: Probability p that an element is dropped, 0 to 1.
        out: Receives y; None allocates it.
    """
    p = _probability(dropout_probability)
    values(input=input)
    output_or_none("out", out, input)
    return list(dropout_forward(input, p, out=out))


def dropout_bwd(
    grad_output: Tensor, mask: Tensor, dropout_probability: float, grad_input: Tensor | None = None
) -> Tensor:
    """Compute the input gradient for `dropout_fwd`, with its mask.

    Args:
        grad_output: y's gradient.
        mask: Mask that `dropout_fwd` returned.
        dropout_probability: Probability p in the forward pass.
        grad_input: Receives the gradient; None allocates it.
    """
    p = _probability(dropout_probability)
    values(grad_output=grad_output)
    tensor("mask", mask)
    output_or_none("grad_input", grad_input, grad_output)
    return dropout_backward(grad_output, mask, p, out=grad_input)


def _probability(dropout_probability: float) -> float:
    p = to_float("dropout_probability", dropout_probability)
    if not 0.0 <= p <= 1.0:
        raise ValueError(
            f"dropout_probability={p} is outside 0 .. 1; give the share of elements to drop"
        )
    return p
