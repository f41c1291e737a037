"""@configure_class(LinearConfig): public module settings are fields in one frozen record, which a write replaces.

```python
@dataclass(frozen=True, eq=False)
class NormConfig(Config):
    eps: float = 1e-5

@configure_class(NormConfig)
class Norm(torch.nn.Module):
    eps: float  # for type checkers; the decorator defines the property

    def __init__(self, eps=1e-5):
        super().__init__()
        self._config = NormConfig(eps=eps)

norm.eps = 0.1  # replaces norm._config by a new record
```

Call caches contain the record in their keys, by identity. A write therefore takes effect in the next call.
Subclasses may write settings before the module's constructor has run; such a write creates the record. Only
the names of its fields are properties, so that a subclass can use other names, among them `config`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch

from .arguments import RULES, Rule

M = TypeVar("M", bound=torch.nn.Module)


@dataclass(frozen=True, eq=False)
class Config:
    """Settings for one module kind. Every field has a default. Two records are never equal."""

    def check(self) -> None:
        """Raise ValueError if settings that need each other are incomplete in a constructed layer."""

    def __copy__(self) -> Config:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Config:
        return self


def configure_class(
    config: type[Config],
    fixed: frozenset[str] = frozenset(),
    handed_down: Mapping[str, tuple[str, ...]] | None = None,
    written: Callable[[Any, str, Any], object] | None = None,
    rules: Mapping[str, Rule] | None = None,
) -> Callable[[type[M]], type[M]]:
    """Return a class decorator that defines a property for every public config field.

    The class also gets the method `fast_setattr`. Fields whose names begin with an underscore get no property.

    Args:
        config: Record class.
        fixed: Fields that determined the module's children and parameters. Assigning another value raises
            AttributeError.
        handed_down: {field: ("child.attribute", ..)} of attributes that receive the same value once the children exist.
        written: Callback `written(module, field, value)` after each write.
        rules: Accepted values, in addition to `arguments.RULES`. A write that the constructor would reject is rejected
            with the same message, as is a write that conflicts with the other fields (`Config.check`).
    """
    if config.__hash__ is not object.__hash__:
        raise TypeError(
            f"{config.__name__} compares its fields, in every look-up; give its dataclass eq=False"
        )

    def decorate(cls: type[M]) -> type[M]:
        cls._config_class = config  # pyright: ignore[reportAttributeAccessIssue]
        if not hasattr(cls, "fast_setattr"):
            cls.fast_setattr = fast_setattr  # pyright: ignore[reportAttributeAccessIssue]
        all_rules = {**RULES, **(rules or {})}
        for field in fields(config):
            if not field.name.startswith("_") and field.name not in vars(cls):
                rule = all_rules.get(field.name)
                setattr(
                    cls,
                    field.name,
                    _setting(field.name, config, fixed, handed_down or {}, written, rule),
                )
        return cls

    return decorate


def write_private(module: Any, **fields: Any) -> None:
    """Write fields in a module's settings whose names begin with an underscore."""
    module._config = replace(module._config, **fields)


def fast_setattr(self: torch.nn.Module, name: str, value: Any) -> None:
    """Set a plain attribute of a module without nn.Module's search for parameters and modules."""
    object.__setattr__(self, name, value)


def _setting(
    name: str,
    config: type[Config],
    fixed: frozenset[str],
    handed_down: Mapping[str, tuple[str, ...]],
    written: Callable[[Any, str, Any], object] | None,
    rule: Rule | None,
) -> property:
    def read(self: Any) -> Any:
        return getattr(self._config, name)

    def write(self: Any, value: Any) -> None:
        attributes = self.__dict__
        children = attributes.get("_modules") or {}
        is_made = bool(children or attributes.get("_parameters"))
        known = attributes.get("_config")
        if known is None:
            known = config()
        before = getattr(known, name)
        if rule is not None:
            value = rule(name, value)
        if name in fixed and is_made and before != value:
            raise AttributeError(
                f"{name}={value!r}: this {type(self).__name__} was made with {name}={before!r}, which "
                f"decides what it consists of; make another one with {name}={value!r}"
            )
        if before is not value:
            known = replace(known, **{name: value})
            if is_made:
                known.check()
        attributes["_config"] = known
        for path in handed_down.get(name, ()):
            child, attribute = path.split(".")
            found = children.get(child)
            if found is not None:
                setattr(found, attribute, value)
        if written is not None:
            written(self, name, value)

    return property(read, write)


def early(module: torch.nn.Module, name: str, default: Any = None) -> Any:
    """Return an attribute that a subclass set before it called the constructor."""
    return getattr(module.__dict__.get("_config"), name, default)
