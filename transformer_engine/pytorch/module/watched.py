"""Containers under the original's names that observe writes, which take effect in the module's next call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ..tensor.quantizer import Quantizer
from .products import ModuleRecipe


class Active:
    """Cached module settings, valid until a container that they depend on is written.

    Attributes:
        before: Settings before a slot was written; its quantizers are combined again instead of recreated.
    """

    __slots__ = ("before", "recipe")

    def __init__(self) -> None:
        self.recipe: ModuleRecipe | None = None
        self.before: ModuleRecipe | None = None

    def forget(self) -> None:
        self.recipe = self.before = None

    def regroup(self) -> None:
        self.before = self.before or self.recipe
        self.recipe = None


class WatchedDict(dict[str, Any]):
    """`fp8_meta`: writing a state recreates quantizers; caller entries under other keys have no effect."""

    def __init__(self, active: Active, content: dict[str, Any]):
        super().__init__(content)
        self.active = active

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.active, dict(self))


class Slots(list[Quantizer]):
    """Quantizers for one direction; after a write, they are combined into products again."""

    def __init__(self, active: Active, quantizers: Iterable[Quantizer] = ()):
        super().__init__(quantizers)
        self.active = active

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.active, list(self))


def _writes(
    base: type, name: str, watched: Callable[[Any], object], notice: Callable[[Active], None]
) -> Callable[..., Any]:
    """Return the method of base, followed by `notice` if it changed the watched object."""
    plain = getattr(base, name)

    def write(self: Any, *arguments: Any, **options: Any) -> Any:
        before = watched(self)
        result = plain(self, *arguments, **options)
        if watched(self) != before:
            notice(self.active)
        return result

    write.__name__ = name
    write.__doc__ = plain.__doc__
    return write


for _name in (
    "__setitem__",
    "__delitem__",
    "__ior__",
    "clear",
    "pop",
    "popitem",
    "setdefault",
    "update",
):
    setattr(
        WatchedDict,
        _name,
        _writes(
            dict,
            _name,
            lambda meta: (id(meta.get("scaling_fwd")), id(meta.get("scaling_bwd"))),
            Active.forget,
        ),
    )
for _name in (
    "__setitem__",
    "__delitem__",
    "__iadd__",
    "append",
    "clear",
    "extend",
    "insert",
    "pop",
    "remove",
    "reverse",
    "sort",
):
    setattr(Slots, _name, _writes(list, _name, lambda slots: list(map(id, slots)), Active.regroup))
