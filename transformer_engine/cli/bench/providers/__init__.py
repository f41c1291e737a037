"""Who runs a case: this engine, plain PyTorch, and other libraries where they are installed."""

from . import operations as operations
from .engine import ENGINE
from .in_jax import JAX, XLA
from .liger import LIGER
from .plain import COMPILED, PLAIN
from .provider import Provider
from .quack import QUACK
from .torchao import TORCHAO

# The engine comes first: the others are shown in relation to it.
PROVIDERS: tuple[Provider, ...] = (ENGINE, PLAIN, COMPILED, TORCHAO, LIGER, QUACK, JAX, XLA)

__all__ = ["ENGINE", "PROVIDERS", "Provider"]
