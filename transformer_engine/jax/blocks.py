"""with block(..): what is written as a generator, as an object that may be entered again, also within itself."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ContextDecorator, contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import ParamSpec

Arguments = ParamSpec("Arguments")


class Block(ContextDecorator):
    """What `with` enters; every time it does, a generator of its own runs to its yield."""

    def __init__(self, begin: Callable[[], AbstractContextManager[None]]):
        self._begin = begin

    def __enter__(self) -> None:
        one = self._begin()
        one.__enter__()
        _entered.set((*_entered.get(), (self, one)))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        entered = _entered.get()
        last = max(place for place, (block, _) in enumerate(entered) if block is self)
        _entered.set((*entered[:last], *entered[last + 1 :]))
        return entered[last][1].__exit__(kind, error, trace)


# Innermost last; of this thread or task alone, as the settings are that a block puts back.
_entered: ContextVar[tuple[tuple[Block, AbstractContextManager[None]], ...]] = ContextVar(
    "transformer_engine_jax_blocks", default=()
)


def reusable(function: Callable[Arguments, Iterator[None]]) -> Callable[Arguments, Block]:
    """contextlib.contextmanager, but for objects that are entered several times; a decorator too."""
    begin = contextmanager(function)

    @functools.wraps(function)
    def block(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Block:
        return Block(functools.partial(begin, *args, **kwargs))

    return block
