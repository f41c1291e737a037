"""Providers for benchmark figures: this engine, plain PyTorch, and other installed libraries."""

from . import operations as operations
from .engine import ENGINE
from .in_jax import JAX, XLA
from .libraries import LIGER, QUACK, TORCHAO
from .plain import COMPILED, PLAIN
from .provider import Provider

# The engine comes first: the others are compared with it.
PROVIDERS: tuple[Provider, ...] = (ENGINE, PLAIN, COMPILED, TORCHAO, LIGER, QUACK, JAX, XLA)

__all__ = ["ENGINE", "PROVIDERS", "Provider"]
