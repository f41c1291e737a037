"""y = softmax(scale * x) of attention logits, whole, masked or causal, and its gradient, by the extension's names."""

from __future__ import annotations

from torch import Tensor

from transformer_engine.pytorch.primitives.softmax import scaled_softmax_backward as softmax_backward
from transformer_engine.pytorch.primitives.softmax import scaled_softmax_forward as softmax_forward


def scaled_softmax_forward(input: Tensor, scale_factor: float) -> Tensor:
    """y [b, h, q, k] = softmax(scale * x) over keys."""
    return softmax_forward(input, scale_factor)


def scaled_softmax_backward(output_grad: Tensor, softmax_results: Tensor, scale_factor: float) -> Tensor:
    """dx = scale * y * (dy - sum(dy * y))."""
    return softmax_backward(output_grad, softmax_results, scale_factor)


def scaled_masked_softmax_forward(input: Tensor, mask: Tensor, scale_factor: float) -> Tensor:
    """y [b, h, q, k] = softmax(scale * x) over the keys that mask [1 | b, 1, q, k] (nonzero: hidden) leaves."""
    return softmax_forward(input, scale_factor, mask=mask)


def scaled_masked_softmax_backward(
    output_grad: Tensor, softmax_results: Tensor, scale_factor: float
) -> Tensor:
    """dx = scale * y * (dy - sum(dy * y)), 0 where the mask hid a key."""
    return softmax_backward(output_grad, softmax_results, scale_factor)


def scaled_upper_triang_masked_softmax_forward(input: Tensor, scale_factor: float) -> Tensor:
    """y [b * h, s, s] = softmax(scale * x) over the keys up to the query's own place."""
    return softmax_forward(input, scale_factor, causal="top_left")


def scaled_upper_triang_masked_softmax_backward(
    output_grads: Tensor, softmax_results: Tensor, scale_factor: float
) -> Tensor:
    """dx = scale * y * (dy - sum(dy * y)), 0 above the diagonal."""
    return softmax_backward(output_grads, softmax_results, scale_factor, causal="top_left")


def scaled_aligned_causal_masked_softmax_forward(input: Tensor, scale_factor: float) -> Tensor:
    """y [b, h, q, k] = softmax(scale * x), the diagonal ending in the last query and the last key."""
    return softmax_forward(input, scale_factor, causal="bottom_right")


def scaled_aligned_causal_masked_softmax_backward(
    output_grad: Tensor, softmax_results: Tensor, scale_factor: float
) -> Tensor:
    """dx = scale * y * (dy - sum(dy * y)), 0 above the diagonal."""
    return softmax_backward(output_grad, softmax_results, scale_factor, causal="bottom_right")
