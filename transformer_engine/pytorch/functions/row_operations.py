"""Chain operations on rows in plain torch operations: scales per row, block orders, SiTU-GLU, L2 norms."""

from __future__ import annotations

import torch
from torch import Tensor


def row_scale(y: Tensor, scales: Tensor) -> Tensor:
    """y [M, N] * scales [M], in float32: scales often have a wider dtype than activations."""
    return (y.float() * scales.reshape(-1, 1).float()).to(y.dtype)


def row_scale_backward(dy: Tensor, y: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of y [M, N] and the scales; the latter sum dy * y over each row."""
    wide = dy.float()
    grad_scales = (wide * y.float()).sum(-1).to(scales.dtype).view(scales.shape)
    return (wide * scales.reshape(-1, 1).float()).to(dy.dtype), grad_scales


def block_order(x: Tensor, blocks: tuple[int, int, int]) -> Tensor:
    """Swap the first two among the three dimensions (-1 once) that the last dimension of x is split into."""
    return x.unflatten(-1, blocks).transpose(-3, -2).reshape(x.shape)


def l2_norm(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """y = x / sqrt(sum(x^2) + eps) over the last dimension, and the reciprocal root."""
    wide = x.float()
    rstdev = torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)
    return (wide * rstdev).to(x.dtype), rstdev


def l2_norm_backward(dy: Tensor, x: Tensor, rstdev: Tensor) -> Tensor:
    """dx = rstdev * (dy - x * rstdev^2 * sum(dy * x))."""
    wide, gradient = x.float(), dy.float()
    along = (gradient * wide).sum(-1, keepdim=True)
    return (rstdev * (gradient - wide * rstdev.square() * along)).to(dy.dtype)


def situ_glu(x: Tensor, constants: tuple[float, float]) -> Tensor:
    """y = beta1 tanh(a / beta1) sigmoid(a) * beta2 tanh(b / beta2) for x = [a, b], in float32."""
    beta1, beta2 = constants
    a, b = x.float().chunk(2, dim=-1)
    gate = beta1 * torch.tanh(a / beta1) * torch.sigmoid(a)
    return (gate * beta2 * torch.tanh(b / beta2)).to(x.dtype)


def situ_glu_backward(dy: Tensor, x: Tensor, constants: tuple[float, float]) -> Tensor:
    """Gradient of x in `situ_glu`."""
    beta1, beta2 = constants
    wide = dy.float()
    a, b = x.float().chunk(2, dim=-1)
    tanh_a, tanh_b, sigmoid = torch.tanh(a / beta1), torch.tanh(b / beta2), torch.sigmoid(a)
    gate, linear = beta1 * tanh_a * sigmoid, beta2 * tanh_b
    gate_slope = (1 - tanh_a.square()) * sigmoid + beta1 * tanh_a * sigmoid * (1 - sigmoid)
    da, db = wide * linear * gate_slope, wide * gate * (1 - tanh_b.square())
    return torch.cat((da, db), dim=-1).to(dy.dtype)
