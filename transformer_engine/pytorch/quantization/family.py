"""Family: the properties of one kind of recipe, as a row; `families` has the rows.

Only the rows depend on the class of a recipe: all other code reads the row of `family_of(recipe)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...common.formats import TensorFormat
from ...common.recipe import Recipe
from ..tensor.quantizer import Quantizer


class Requirement(NamedTuple):
    """Hardware that computes a kind of format: compute capability least <= c < below, and a version of CUDA."""

    title: str
    least: tuple[int, int]
    below: tuple[int, int] | None = None
    cuda: tuple[int, int] = (0, 0)


class FormatSample(NamedTuple):
    """A format by its name in measurements, and its quantizer with E4M3 (or E2M1) codes.

    make   (device, rowwise=, columnwise=) -> quantizer
    """

    name: str
    format: TensorFormat
    make: Callable[..., Quantizer]


@dataclass(frozen=True, eq=False)
class Family:
    """One row. The defaults suit scales that are computed from the tensor itself.

    recipe           the public class; a recipe derived from it is of the family
    name             the family on command lines and in reports
    state            (recipe, mode=, num_quantizers=, device=, roles=) -> RecipeState
    quantizer        (recipe, mode, tensor, device) -> the quantizer of a slot, where no state makes it
    kind, needs      requirement on the machine (`support`); None: no requirement
    alignment        (recipe) -> rows of a group are padded to a multiple of this before quantization
    samples          its formats, to be measured one by one
    attention        scaling of FP8 attention: "delayed", "current" or "block"; None: unsupported
    measured_as      name of the measurements of its products in `module/precision.py`; None: not measured
    stateful         its states take part in scale updates
    follows_history  scales depend on earlier steps, so that they have changed by the backward
    checkpointed     a checkpoint may hold the recipe; False for recipes with code
    fits             whether it may be the default recipe on this machine; the last row that fits is
    """

    recipe: type[Recipe]
    name: str
    state: Callable[..., Any]
    quantizer: Callable[[Any, str, str, torch.device], Quantizer] | None
    kind: str | None = None
    needs: Requirement | None = None
    alignment: Callable[[Any], int] = lambda recipe: 16
    samples: tuple[FormatSample, ...] = ()
    attention: str | None = None
    measured_as: str | None = None
    stateful: bool = False
    follows_history: bool = False
    checkpointed: bool = True
    fits: Callable[[], bool] | None = None


_FAMILIES: dict[type[Recipe], Family] = {}


def register(family: Family) -> Family:
    """Add a row."""
    _FAMILIES[family.recipe] = family
    return family


def unregister(family: Family) -> None:
    """Remove a row."""
    del _FAMILIES[family.recipe]


def all_families() -> Sequence[Family]:
    """The rows, in the order in which they were added."""
    return tuple(_FAMILIES.values())


def family_of(recipe: Recipe) -> Family:
    """The row of the class that recipe is, or is derived from."""
    row = _FAMILIES.get(type(recipe))
    if row is not None:
        return row
    for base in type(recipe).__mro__[1:]:
        row = _FAMILIES.get(base)
        if row is not None:
            return row
    raise ValueError(
        f"{type(recipe).__name__} is not one of {', '.join(kind.__name__ for kind in _FAMILIES)}; derive it from one"
    )


def family_named(name: str) -> Family:
    """The row with that name; ValueError lists those there are."""
    for row in _FAMILIES.values():
        if row.name == name:
            return row
    raise ValueError(f"unknown recipe {name!r}; choose one of {', '.join(r.name for r in all_families())}")
