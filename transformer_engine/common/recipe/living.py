"""Recipes that are in use: found by their description, told apart by their revision, changed by checked assignments."""

from __future__ import annotations

import functools
import warnings
import weakref
from dataclasses import fields, replace
from typing import Any, TypeVar

from ..warning import warn_of_unused
from .field_checks import demand_readable_defaults

_living: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def description_of(recipe: Any) -> str:
    """repr(recipe), which its constructor left on it: in a graph of dynamic shapes floats are symbols without text."""
    known = getattr(recipe, "_description", None)
    return repr(recipe) if known is None else known


def revision_of(recipe: Any) -> object:
    """An object that is another one after each write to a field: who keeps what follows from a recipe compares it."""
    return getattr(recipe, "_description", None)


def still_says(kept: Any, revision: object, recipe: Any) -> bool:
    """Is recipe, in the same object or another, what `kept` was at that revision?"""
    return revision is revision_of(kept) and kept == recipe


def recipe_described_as(description: str) -> Any:
    """The living recipe whose repr is `description`: a compiler can hand on a string where it cannot an object."""
    for recipe in list(_living.values()):
        if repr(recipe) == description:
            return recipe
    raise LookupError(f"no recipe is {description}; keep a reference to the recipe while it is in use")


RecipeClass = TypeVar("RecipeClass", bound=type)


def recipe_class(cls: RecipeClass) -> RecipeClass:
    """Of every recipe: its instances are found by their description, and keywords of other versions are dropped.

    Callers pass such keywords, which cost one warning.
    """
    strict = cls.__init__
    known = frozenset(f.name for f in fields(cls) if f.init)

    @functools.wraps(strict)
    def __init__(self, *args: Any, **keywords: Any) -> None:
        demand_readable_defaults()
        warn_of_unused()
        unknown = [name for name in keywords if name not in known]
        if unknown:
            warnings.warn(
                f"{cls.__name__} ignores unknown arguments: {', '.join(unknown)}", UserWarning, stacklevel=2
            )
            for name in unknown:
                del keywords[name]
        self.__dict__.pop("_description", None)
        strict(self, *args, **keywords)
        enroll(self)

    cls.__init__ = __init__
    cls._is_recipe_class = True  # pyright: ignore[reportAttributeAccessIssue]
    return cls


def enroll(recipe: Any) -> None:
    """Record the description of a complete recipe, by which `recipe_described_as` finds it.

    A copy whose description is the same keeps the original's string object, which is its revision.
    """
    description = repr(recipe)
    if recipe.__dict__.get("_description") != description:
        recipe.__dict__["_description"] = description
    _living[id(recipe)] = recipe


def assign(recipe: Any, name: str, value: Any) -> None:
    """recipe.name = value after construction: fields that follow from it follow, and what the constructor refuses is.

    Of a derived field (`fp8_quant_*`, `fp4_quant_*`) that changes which the written switch decides; what a caller has
    assigned to the rest of it stays. A refused value leaves the recipe as it was.
    """
    before = dict(recipe.__dict__)
    derived = recipe._derived()
    object.__setattr__(recipe, name, value)
    try:
        recipe._convert()
        recipe._check()
        for field, params in recipe._derived().items():
            decided = {
                part.name: getattr(params, part.name)
                for part in fields(params)
                if getattr(params, part.name) != getattr(derived[field], part.name)
            }
            if decided and field in recipe.__dict__:
                recipe.__dict__[field] = replace(recipe.__dict__[field], **decided)
        recipe.__dict__["_description"] = repr(recipe)
    except Exception:
        recipe.__dict__.clear()
        recipe.__dict__.update(before)
        raise
