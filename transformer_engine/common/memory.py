"""memory[key] = build(key): what earlier calls found out, kept for later ones with an equal key.

An answer that is kept must not depend on anything but its key, or it is stale when that changes. So `build` gets the
key and nothing else: it is a plain function of a module, with no closure, no default and no object bound to it through
which it could read more. What the environment says goes into a key as `env.generation()`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from types import FunctionType
from typing import Any, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Memory(dict[K, V]):
    """A dictionary that makes what it is asked for and has not got.

    build   value = build(*fixed, key); TypeError unless it is a plain function
    most    entries that it holds at most: calls of ever new shapes empty it, rather than fill the process's memory
    fixed   what is the same for every key; hashable, for what can change belongs into the key

    A warm look-up is that of a dict. An exception of build's is not kept: the next look-up builds again. A copy, or
    what comes back from a pickle, begins empty.
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
                f"build={build!r} is not a plain function: what it is bound to, closes over or defaults to would be no "
                "part of a key; write a function of the module, and hand it what it needs in the key"
            )
        hash(fixed)
        self.build = build
        self.most = most
        self.fixed = fixed

    def __missing__(self, key: K) -> V:
        value = self.build(*self.fixed, key)
        if len(self) >= self.most:
            self.clear()
        self[key] = value
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.build, self.most, *self.fixed)

    def __deepcopy__(self, memo: dict[int, Any]) -> Memory[K, V]:
        return self.__copy__()

    def __copy__(self) -> Memory[K, V]:
        return type(self)(self.build, self.most, *self.fixed)
