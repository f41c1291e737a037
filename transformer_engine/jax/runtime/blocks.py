"""Context managers from generator functions that can be entered several times, also within themselves."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ContextDecorator, contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import ParamSpec

Arguments = ParamSpec("Arguments")


class ReusableContext(ContextDecorator):
    """Context manager that can be entered several times; each entry runs a new generator to its yield."""

    def __init__(self, begin: Callable[[], AbstractContextManager[None]]):
        self._begin = begin

    def __enter__(self) -> None:
        context = self._begin()
        context.__enter__()
        _entered.set((*_entered.get(), (self, context)))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        entered = _entered.get()
        last = max(index for index, (block, _) in enumerate(entered) if block is self)
        _entered.set((*entered[:last], *entered[last + 1 :]))
        return entered[last][1].__exit__(kind, error, trace)


# Innermost last; local to the thread or task, like the settings that a context restores.
_entered: ContextVar[tuple[tuple[ReusableContext, AbstractContextManager[None]], ...]] = ContextVar(
    "transformer_engine_jax_blocks", default=()
)


def reusable(function: Callable[Arguments, Iterator[None]]) -> Callable[Arguments, ReusableContext]:
    """Convert a generator function to a context manager, as `contextlib.contextmanager`.

    The returned objects can be entered several times and used as decorators.
    """
    begin = contextmanager(function)

    @functools.wraps(function)
    def block(*args: Arguments.args, **kwargs: Arguments.kwargs) -> ReusableContext:
        return ReusableContext(functools.partial(begin, *args, **kwargs))

    return block
