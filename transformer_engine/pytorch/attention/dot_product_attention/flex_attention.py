"""Alias of backends.flex: the attention that torch.compile writes kernels for."""

from .backends.flex import BACKEND, refuses, run

__all__ = ["BACKEND", "refuses", "run"]
