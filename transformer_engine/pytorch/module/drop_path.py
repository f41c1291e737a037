"""DropPath: stochastic depth, which drops a residual branch for whole samples at random."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...common.numbers import to_int
from ..runtime.checks import floating
from .arguments import drop_rate


class DropPath(nn.Module):
    """y = x * keep / (1 - p) with one draw of keep per sample: stochastic depth (arXiv:1603.09382).

    p = 1 drops every sample: y is zero in training.

    Args:
        drop_prob: Probability p in [0, 1] of dropping a sample.
        batch_dim: Sample axis: 1 for [s, b, h], 0 for [b, s, h].
    """

    def __init__(self, drop_prob: float = 0.0, batch_dim: int = 1):
        super().__init__()
        self.drop_prob = drop_rate("drop_prob", drop_prob)
        self.batch_dim = to_int("batch_dim", batch_dim, 0)

    def forward(self, hidden_state: Tensor) -> Tensor:
        floating("hidden_state", hidden_state)
        if hidden_state.ndim <= self.batch_dim:
            raise ValueError(
                f"hidden_state is {list(hidden_state.shape)} and has no axis {self.batch_dim} of samples; "
                "give it that axis, or set batch_dim"
            )
        if self.drop_prob == 0.0 or not self.training:
            return hidden_state
        if self.drop_prob == 1.0:
            everywhere = torch.ones((), dtype=torch.bool, device=hidden_state.device)
            return hidden_state.masked_fill(everywhere, 0.0)  # x * 0.0 would be NaN for infinities
        shape = [1] * hidden_state.ndim
        shape[self.batch_dim] = hidden_state.shape[self.batch_dim]
        uniform = torch.rand(shape, dtype=torch.float32, device=hidden_state.device)
        keep = (uniform >= self.drop_prob).to(hidden_state.dtype)
        return hidden_state * keep / (1.0 - self.drop_prob)

    _layer_forward = forward

    def extra_repr(self) -> str:
        return f"drop_prob={self.drop_prob}"


def batch_dimension(tensor_format: str) -> int:
    """Return the sample axis in "sbhd" or "bshd", and the token axis in "thd"."""
    return 1 if tensor_format == "sbhd" else 0
