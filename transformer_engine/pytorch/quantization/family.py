"""Family: what is different about one kind of recipe, as a row; `families` has the rows.

Nothing but the rows asks which recipe is in force: everything else reads the row of `family_of(recipe)`.
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
    """What computes a kind of format in hardware: compute capability least <= c < below, and a version of CUDA."""

    title: str
    least: tuple[int, int]
    below: tuple[int, int] | None = None
    cuda: tuple[int, int] = (0, 0)


class Sample(NamedTuple):
    """A format by the name that measurements give it, and a quantizer to it of E4M3 (or E2M1) codes.

    make   (device, rowwise=, columnwise=) -> quantizer
    """

    name: str
    format: TensorFormat
    make: Callable[..., Quantizer]


def _sixteen(recipe: Any) -> int:
    return 16


@dataclass(frozen=True, eq=False)
class Family:
    """One row. Everything but the first four has a default that suits scales made from the tensor at hand.

    recipe           the public class; a recipe derived from it is of the family
    name             the family on command lines and in reports
    state            (recipe, mode=, num_quantizers=, device=, roles=) -> RecipeState
    quantizer        (recipe, mode, tensor, device) -> the quantizer of a slot, where no state makes it
    kind, needs      what the machine is asked for (`support`); None: the recipe answers for itself
    alignment        (recipe) -> rows of a group are padded to a multiple of this before quantization
    samples          its formats, to be measured one by one
    attention        how FP8 attention scales under it: "delayed", "current" or "block"; None: there is none
    measured_as      under which name `fp8_worth` has measurements of its products; None: it has none
    stateful         do its states take part in scale updates?
    follows_history  does a scale follow what earlier steps saw, so that it has moved on by the backward?
    checkpointed     may a checkpoint hold the recipe? Not one with code in it
    fits             is it the default recipe on this machine? The last row that says so is
    """

    recipe: type[Recipe]
    name: str
    state: Callable[..., Any]
    quantizer: Callable[[Any, str, str, torch.device], Quantizer] | None
    kind: str | None = None
    needs: Requirement | None = None
    alignment: Callable[[Any], int] = _sixteen
    samples: tuple[Sample, ...] = ()
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
    """Take a row away."""
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
        f"{type(recipe).__name__} is none of {', '.join(kind.__name__ for kind in _FAMILIES)}; derive it from one"
    )


def family_named(name: str) -> Family:
    """The row with that name; ValueError lists those there are."""
    for row in _FAMILIES.values():
        if row.name == name:
            return row
    raise ValueError(
        f"there is no recipe {name!r}; choose one of {', '.join(r.name for r in all_families())}"
    )
