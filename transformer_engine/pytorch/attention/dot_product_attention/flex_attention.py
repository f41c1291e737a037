"""Alias of primitives.attention.backends.flex: the attention that torch.compile writes kernels for."""

from ...primitives.attention.backends.flex import BACKEND, run, unsupported_reason

__all__ = ["BACKEND", "run", "unsupported_reason"]
