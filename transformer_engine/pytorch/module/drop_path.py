"""DropPath: whole samples of a residual branch dropped at random."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...common.checks import drop_rate, whole
from ..runtime.checks import floating


class DropPath(nn.Module):
    """y = x * keep / (1 - p), keep drawn once a sample: stochastic depth (arXiv:1603.09382).

    batch_dim   the axis of the samples: 1 for [s, b, h], 0 for [b, s, h]
    """

    def __init__(self, drop_prob: float = 0.0, batch_dim: int = 1):
        drop_rate("drop_prob", drop_prob)
        whole("batch_dim", batch_dim, 0)
        super().__init__()
        self.drop_prob = drop_prob
        self.batch_dim = batch_dim

    def forward(self, hidden_state: Tensor) -> Tensor:
        floating("hidden_state", hidden_state)
        if hidden_state.ndim <= self.batch_dim:
            raise ValueError(
                f"hidden_state is {list(hidden_state.shape)}, its samples lie along axis {self.batch_dim}; "
                "give it that axis, or set batch_dim"
            )
        if self.drop_prob == 0.0 or not self.training:
            return hidden_state
        shape = [1] * hidden_state.ndim
        shape[self.batch_dim] = hidden_state.shape[self.batch_dim]
        uniform = torch.rand(shape, dtype=torch.float32, device=hidden_state.device)
        keep = (uniform >= self.drop_prob).to(hidden_state.dtype)
        return hidden_state * keep / (1.0 - self.drop_prob)

    def extra_repr(self) -> str:
        return f"drop_prob={self.drop_prob}"


def batch_dimension(tensor_format: str) -> int:
    """The axis of the samples in "sbhd", "bshd" or "thd"."""
    return 1 if tensor_format == "sbhd" else 0
