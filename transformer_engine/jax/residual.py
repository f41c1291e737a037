"""A residual connection round a norm: the gradient that goes round is added in the kernel of the norm's gradient.

x + block(norm(x)) reads x twice, and JAX would add both gradients in a kernel of its own. So the norm answers with x
too, whoever adds reads that, and the norm's rule is given both gradients: dx = dnorm + dy in float32, rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from jax import Array


@dataclass(eq=False)
class Residual:
    """What goes round a block of x: x itself until a norm of it has answered with it."""

    x: Array
    value: Array


_AROUND: ContextVar[Residual | None] = ContextVar("residual", default=None)


@contextmanager
def around(x: Array, read: bool) -> Iterator[Residual]:
    """The residual of a block that is traced within: the first norm of this very array takes x along.

    read   will its value be? What goes round and is read by nobody would have a gradient of zeros, which is added.
    """
    made = Residual(x, x)
    token = _AROUND.set(made if read else None)
    try:
        yield made
    finally:
        _AROUND.reset(token)


def goes_round(x: Array) -> bool:
    """Is a norm of x to answer with x too, through `taken_along`?"""
    found = _AROUND.get()
    return found is not None and found.x is x and found.value is x


def taken_along(passed: tuple[Array, ...]) -> None:
    """Makes what a rule of differentiation answered beside its result what goes round; () where nothing does."""
    for value in passed:
        found = _AROUND.get()
        assert found is not None, "`goes_round` has said so"
        found.value = value
