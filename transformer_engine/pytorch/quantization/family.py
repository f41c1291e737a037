"""Family: properties of one recipe kind, as a table row; the rows are in `families`.

Only the rows depend on the class of a recipe: all other code reads the row from `find_family(recipe)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...common.formats import TensorFormat
from ...common.hardware import Capability
from ...common.recipe import Recipe
from ..tensor.quantizer import Quantizer


class Requirement(NamedTuple):
    """Hardware that supports a format kind: a capability in the hardware table, and a CUDA version.

    Attributes:
        title: Name in messages.
        capability: Capability in the hardware table.
        cuda: First CUDA version.
    """

    title: str
    capability: Capability
    cuda: tuple[int, int] = (0, 0)


class FormatSample(NamedTuple):
    """A format by its name in measurements, and its quantizer with E4M3 (or E2M1) codes.

    Attributes:
        name: Name in measurements.
        format: The format.
        make: `make(device, rowwise=.., columnwise=..)` returns a quantizer.
    """

    name: str
    format: TensorFormat
    make: Callable[..., Quantizer]


def _shares_scales(recipe: Recipe) -> str | None:
    return "its quantizers may share scales among rows; use DelayedScaling, whose scales come from earlier steps"


def rows_are_independent(recipe: Recipe) -> None:
    """Accept a recipe: `Family.batch_dependence` if the codes of a row depend on this row and on earlier steps."""
    return None


@dataclass(frozen=True, eq=False)
class Family:
    """Properties of one recipe kind. The defaults suit scales that are computed from the tensor itself.

    Attributes:
        recipe: The public class; recipes derived from it belong to the family.
        name: Name on command lines and in reports.
        state: `state(recipe, mode=, num_quantizers=, device=, roles=)` returns a RecipeState.
        quantizer: `quantizer(recipe, mode, tensor, device)` returns the quantizer of a slot; None:
            the state creates the quantizers.
        kind: Hardware requirement name (see `support`).
        requirement: Hardware that runs the formats natively; None: any hardware.
        alignment: `alignment(recipe)` returns the multiple to which a group's rows are padded before quantization.
        samples: Formats of the family, which are measured one by one.
        attention: FP8 attention scaling: "delayed", "current", "mxfp8" or "block"; None: unsupported.
        measured_as: Name of the product measurements in `functions/precision.py`; None: not measured.
        stateful: Whether its states take part in scale updates.
        follows_history: Whether scales depend on earlier steps, and so change between the forward and backward passes.
        checkpointed: Whether a checkpoint may contain the recipe; False for recipes with code.
        batch_dependence: `batch_dependence(recipe)` returns why the codes of a row depend on the other rows and what
            avoids it, or None.
        fits: Returns whether it may be the default recipe on this machine. The last row that fits is the default.
    """

    recipe: type[Recipe]
    name: str
    state: Callable[..., Any]
    quantizer: Callable[[Any, str, str, torch.device], Quantizer] | None
    kind: str | None = None
    requirement: Requirement | None = None
    alignment: Callable[[Any], int] = lambda recipe: 16
    samples: tuple[FormatSample, ...] = ()
    attention: str | None = None
    measured_as: str | None = None
    stateful: bool = False
    follows_history: bool = False
    checkpointed: bool = True
    batch_dependence: Callable[[Any], str | None] = _shares_scales
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
    """Return the rows, in registration order."""
    return tuple(_FAMILIES.values())


def find_family(recipe: Recipe) -> Family:
    """Return the row for the recipe's class or its nearest registered base class."""
    row = _FAMILIES.get(type(recipe))
    return _find_inherited_family(recipe) if row is None else row


def _find_inherited_family(recipe: Recipe) -> Family:
    """Return the row for the nearest registered base class of a recipe's class."""
    for base in type(recipe).__mro__[1:]:
        row = _FAMILIES.get(base)
        if row is not None:
            return row
    raise ValueError(
        f"{type(recipe).__name__} is not one of {', '.join(kind.__name__ for kind in _FAMILIES)}; derive it from one"
    )


def family_named(name: str) -> Family:
    """Return the row with that name; raise ValueError that lists the names if there is no such row."""
    for row in _FAMILIES.values():
        if row.name == name:
            return row
    raise ValueError(
        f"unknown recipe {name!r}; choose one of {', '.join(r.name for r in all_families())}"
    )
