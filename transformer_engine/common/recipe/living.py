"""Recipes in use: look-up by description, revisions, and validated assignments."""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import fields, replace
from typing import Any, TypeVar

from .. import tracing
from ..checks import nearest
from ..dispatch import is_tracing
from ..warning import warn_of_unused
from .field_checks import demand_readable_defaults

_living: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

# Keywords from earlier releases, and from clients that pass their layers' keywords: Megatron's and GPT-NeoX's recipes
# have all four, Accelerate passes the first two. Each has the values that change nothing, or None for any value.
_WITHOUT_EFFECT: dict[str, tuple[Any, ...] | None] = {
    "interval": (1,),  # scales are updated in every step
    "override_linear_precision": (
        (False, False, False),
        None,
    ),  # no product is computed in high precision
    "params_dtype": None,
    "device": None,
}


def recipe_description(recipe: Any) -> str:
    """repr(recipe), which the constructor stored: floats in graphs with dynamic shapes have no repr."""
    cached = getattr(recipe, "_description", None)
    return repr(recipe) if cached is None else cached


def recipe_revision(recipe: Any) -> object:
    """Object that is replaced when a write changes the description; caches derived from a recipe compare it."""
    return getattr(recipe, "_description", None)


def is_unchanged(cached: Any, revision: object, recipe: Any) -> bool:
    """Whether a recipe equals the recipe `cached` at that revision."""
    return revision is recipe_revision(cached) and cached == recipe


def recipe_described_as(description: str) -> Any:
    """Get the recipe in use with this repr; compilers can pass strings but not recipe objects."""
    for recipe in list(_living.values()):
        if repr(recipe) == description:
            return recipe
    raise LookupError(
        f"no recipe is {description}; keep a reference to the recipe while it is in use"
    )


RecipeClass = TypeVar("RecipeClass", bound=type)


class _Construction(threading.local):
    """Whether this thread constructs an object for a tracing compiler, in eager mode."""

    running = False


class _Constructed:
    """Objects from traced constructor calls as attributes, because a compiler copies a dict before its first read."""


def _identity(value: Any) -> Any:
    return value


_specialized: Callable[[Any], Any] = _identity
_construction = _Construction()
_constructed = _Constructed()
_constructed_lock = threading.Lock()


def set_specialization(specialized: Callable[[Any], Any]) -> None:
    """Set the function that converts a traced argument to a constant; a framework with a compiler calls this once.

    Args:
        specialized: Called only while the compiler traces. It returns the number of a symbol, for which the compiler
            then specializes the graph, and raises an error for a value that the compiler does not know.
    """
    global _specialized
    _specialized = specialized


def construct_as_constant(cls: RecipeClass) -> RecipeClass:
    """Class decorator: a compiler that traces a constructor call reads the finished object.

    Compilers cannot trace the inspection of a dataclass's fields. `__new__` constructs the object in eager mode, and
    the `__init__` that follows it leaves the object unchanged. Frozen objects are shared. Otherwise, every call to the
    compiled function gets a copy, because its caller may assign the attributes.
    """
    initialize = cls.__init__
    frozen: bool = cls.__dataclass_params__.frozen

    @functools.wraps(initialize)  # `inspect` takes the signature of a class from __new__
    def __new__(new: type, *args: Any, **keywords: Any) -> Any:
        if is_tracing() and not _construction.running:
            arguments = [_specialized(value) for value in args]
            named = {name: _specialized(value) for name, value in keywords.items()}
            name = _construct(new, *arguments, **named)
            return (
                getattr(_constructed, name) if frozen else _traced_copy(object.__new__(new), name)
            )
        return object.__new__(new)

    @functools.wraps(initialize)
    def __init__(self: Any, *args: Any, **keywords: Any) -> None:
        if not is_tracing() or _construction.running:
            initialize(self, *args, **keywords)

    cls.__new__, cls.__init__ = __new__, __init__
    return cls


@contextmanager
def _constructing() -> Iterator[None]:
    """Run a block in eager mode for a tracing compiler, in one thread at a time."""
    with _constructed_lock:
        _construction.running = True
        try:
            yield
        finally:
            _construction.running = False


def _construct(cls: type, /, *args: Any, **keywords: Any) -> str:
    """Construct an object in eager mode, and return the name of the equal attribute in `_constructed`."""
    with _constructing():
        return _store(cls(*args, **keywords))


tracing.constant_while_tracing(_construct)  # a decorator's type would rename its parameter `cls`


@tracing.constant_while_tracing
def _assign_field(description: str, field: str, value: Any) -> str:
    """Assign a field in a copy of the recipe with this description, as `_construct` constructs a recipe."""
    with _constructing():
        result = copy(recipe_described_as(description))
        setattr(result, field, value)
        # Descriptions do not show a subclass's other attributes, which remain the assigned recipe's.
        for name in vars(result).keys() - {"_description", *(f.name for f in fields(result))}:
            del result.__dict__[name]
        return _store(result)


def _store(instance: Any) -> str:
    """Store an object in `_constructed`, and return its attribute name there; equal objects share one."""
    cached = vars(_constructed)
    for name, other in cached.items():
        if type(other) is type(instance) and vars(other) == vars(instance):
            return name
    name = f"record_{len(cached)}"
    cached[name] = instance
    return name


@tracing.constant_while_tracing
def _attributes_of_stored(name: str) -> tuple[str, ...]:
    """List the attribute names of an object in `_constructed`."""
    return tuple(vars(getattr(_constructed, name)))


def _traced_copy(target: Any, name: str) -> Any:
    """Copy the attributes of an object in `_constructed` to another one, in operations that compilers trace."""
    constructed = getattr(_constructed, name)
    for attribute in _attributes_of_stored(name):
        object.__setattr__(target, attribute, getattr(constructed, attribute))
    return target


def has_no_effect(name: str, value: Any) -> bool:
    """Whether a keyword that recipes do not have comes from an earlier release, with a value that has no effect."""
    if name not in _WITHOUT_EFFECT:
        return False
    values = _WITHOUT_EFFECT[name]
    if values is None:
        return True
    plain = tuple(value) if isinstance(value, tuple | list) else value
    return any(type(plain) is type(candidate) and plain == candidate for candidate in values)


def recipe_class(cls: RecipeClass) -> RecipeClass:
    """Decorate a recipe class: register instances, and drop unknown keywords.

    Warns of each dropped keyword, except keywords of earlier releases with a value that changes nothing.
    """
    strict = cls.__init__
    names = frozenset(f.name for f in fields(cls) if f.init)

    @functools.wraps(strict)
    def __init__(self, *args: Any, **keywords: Any) -> None:
        demand_readable_defaults()
        warn_of_unused()
        dropped = {name: keywords.pop(name) for name in list(keywords) if name not in names}
        unknown = [name for name, value in dropped.items() if not has_no_effect(name, value)]
        if unknown:
            suggestions = [(name, nearest(name, names)) for name in unknown]
            listed = [
                f"{name} (did you mean {meant}?)" if meant else name for name, meant in suggestions
            ]
            warnings.warn(
                f"{cls.__name__} ignores unknown arguments: {', '.join(listed)}",
                UserWarning,
                stacklevel=3,  # through the __init__ of `construct_as_constant`
            )
        self.__dict__.pop("_description", None)
        strict(self, *args, **keywords)
        enroll(self)

    cls.__init__ = __init__
    cls._is_recipe_class = True
    return construct_as_constant(cls)


def enroll(recipe: Any) -> None:
    """Record the description of a complete recipe, by which `recipe_described_as` finds it.

    A copy whose description is the same keeps the original's string object, which is its revision.
    """
    description = repr(recipe)
    if recipe.__dict__.get("_description") != description:
        recipe.__dict__["_description"] = description
    _living[id(recipe)] = recipe


def assign(recipe: Any, name: str, value: Any) -> None:
    """Assign a field in a constructed recipe: update derived fields and validate as in the constructor.

    Of the derived fields (`fp8_quant_*`, `fp4_quant_*`) only the parts that depend on the assigned switch change; other
    assignments of the caller remain. An invalid value leaves the recipe unchanged.
    """
    if is_tracing() and not _construction.running:
        if name in recipe.__dataclass_fields__:
            _traced_copy(recipe, _assign_field(recipe._description, name, _specialized(value)))
        else:
            object.__setattr__(recipe, name, value)
        return
    before = dict(recipe.__dict__)
    derived = recipe._derived_fields()
    object.__setattr__(recipe, name, value)
    try:
        recipe._convert()
        recipe._check()
        for field, params in recipe._derived_fields().items():
            decided = {
                part.name: getattr(params, part.name)
                for part in fields(params)
                if getattr(params, part.name) != getattr(derived[field], part.name)
            }
            if decided and field in recipe.__dict__:
                recipe.__dict__[field] = replace(recipe.__dict__[field], **decided)
        enroll(recipe)
    except Exception:
        recipe.__dict__.clear()
        recipe.__dict__.update(before)
        raise
