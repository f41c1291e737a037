"""Alias of primitives.attention.backends.flex: the attention that torch.compile writes kernels for."""

from ...primitives.attention.backends.flex import BACKEND, refuses, run

__all__ = ["BACKEND", "refuses", "run"]
