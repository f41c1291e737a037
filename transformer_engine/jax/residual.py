"""Residual connections around a norm: the kernel of the norm's gradient adds the gradient that bypasses the block.

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
    """The value that bypasses a block of x: x itself, then the x that a norm of it returned."""

    x: Array
    value: Array


_AROUND: ContextVar[Residual | None] = ContextVar("residual", default=None)


@contextmanager
def around(x: Array, read: bool) -> Iterator[Residual]:
    """Register the residual of a block that is traced in the context: the first norm of this array returns x too.

    read: whether the value is read; the norm would add a gradient of zeros otherwise.
    """
    made = Residual(x, x)
    token = _AROUND.set(made if read else None)
    try:
        yield made
    finally:
        _AROUND.reset(token)


def goes_round(x: Array) -> bool:
    """Return whether a norm of x must return x too; see `taken_along`."""
    found = _AROUND.get()
    return found is not None and found.x is x and found.value is x


def taken_along(passed: tuple[Array, ...]) -> None:
    """Store the x that a derivative rule returned as the residual's value; passed is () without a residual."""
    for value in passed:
        found = _AROUND.get()
        assert found is not None, "`goes_round` returned True"
        found.value = value
