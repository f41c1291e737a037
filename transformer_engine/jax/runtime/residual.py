"""Residual connections around a norm: the norm-gradient kernel adds the gradient that bypasses the block.

x + block(norm(x)) reads x twice, and JAX would add both gradients in another kernel. Therefore the norm returns x too,
the addition reads that x, and the norm's derivative rule receives both gradients: dx = dnorm + dy in float32, rounded
once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from jax import Array


@dataclass(eq=False)
class Residual:
    """The value that bypasses a block: x itself, then the x that its norm returned."""

    x: Array
    value: Array


_RESIDUAL: ContextVar[Residual | None] = ContextVar("residual", default=None)


@contextmanager
def bypass(x: Array, read: bool) -> Iterator[Residual]:
    """Register a residual connection for a block that is traced in the context.

    The first norm of x in the block returns x too. Set `read` only if the block reads the residual's value; otherwise
    the norm would add a zero gradient.
    """
    residual = Residual(x, x)
    token = _RESIDUAL.set(residual if read else None)
    try:
        yield residual
    finally:
        _RESIDUAL.reset(token)


def is_bypassed(x: Array) -> bool:
    """Whether a norm over x must return x too; see `store_returned_input`."""
    residual = _RESIDUAL.get()
    return residual is not None and residual.x is x and residual.value is x


def store_returned_input(passed: tuple[Array, ...]) -> None:
    """Store the x that a derivative rule returned as the residual's value; passed is () without a residual."""
    for value in passed:
        residual = _RESIDUAL.get()
        assert residual is not None, "`is_bypassed` returned True"
        residual.value = value
