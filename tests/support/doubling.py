"""A table of backends that double numbers, by which tests of the self-test check its verdicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformer_engine.common.dispatch import Backend, Table, tables


@contextmanager
def doubling_table(
    name: str, next_number: Callable[[Any], Any], message: str, **options: Any
) -> Iterator[Table[Any]]:
    """A table with one correct backend, one with a wrong last bit, and one that raises RuntimeError.

    Args:
        name: Operation name, which exists only inside the context.
        next_number: Function that returns the next larger floating-point numbers.
        message: Message of the error.
        options: Further arguments of `Table`.
    """

    def fail(x: Any) -> Any:
        raise RuntimeError(message)

    calls = {
        "native": lambda x: x * 2,
        "wrong": lambda x: next_number(x * 2),
        "raising": fail,
        "reference": lambda x: x + x,
    }
    backends = [Backend(key, bind=lambda request, call=call: call) for key, call in calls.items()]
    other = Backend(
        "other", unsupported_reason=lambda request: "it needs a GPU", bind=lambda request: fail
    )
    try:
        yield Table(name, (*backends[:3], other, backends[3]), **options)
    finally:
        del tables[name]
