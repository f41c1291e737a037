"""memory[key] = build(key): a cache whose values depend on their keys only.

A value that depends on anything else would be stale after a change. `build` is therefore a plain module-level function,
without closure, defaults or bound object, and receives only the key. Keys include the environment as
`env.generation()`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from types import FunctionType
from typing import Any, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Memory(dict[K, V]):
    """A dict that builds missing values.

    A cache hit costs a dict look-up. Exceptions raised in `build` are not cached. Copies and unpickled caches are
    empty.

    Args:
        build: Computes a value, `build(*fixed, key)`.
        most: Maximum number of entries. A full cache drops its oldest entry, so that changing shapes do not fill the
            memory.
        fixed: Arguments that are equal for all keys; hashable, because mutable values belong into the key.

    Raises:
        TypeError: `build` is not a plain function.
    """

    __slots__ = ("build", "fixed", "most")

    def __init__(self, build: Callable[..., V], most: int, *fixed: Hashable):
        super().__init__()
        if (
            not isinstance(build, FunctionType)
            or build.__closure__
            or build.__defaults__
            or build.__kwdefaults__
        ):
            raise TypeError(
                f"build={build!r} is not a plain function: its bound object, closure and defaults would not be part of "
                "the key; write a function of the module, and put all of its inputs into the key"
            )
        hash(fixed)
        self.build = build
        self.most = most
        self.fixed = fixed

    def __missing__(self, key: K) -> V:
        value = self.build(*self.fixed, key)
        if len(self) >= self.most:
            self.pop(next(iter(self)), None)  # None: another thread may have dropped it
        self[key] = value
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.build, self.most, *self.fixed)

    def __deepcopy__(self, memo: dict[int, Any]) -> Memory[K, V]:
        return self.__copy__()

    def __copy__(self) -> Memory[K, V]:
        return type(self)(self.build, self.most, *self.fixed)
