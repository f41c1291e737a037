"""Quantizers for linear products, and module settings under one recipe, from which specs are built."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

from ...common.recipe import Recipe, is_unchanged, recipe_revision
from ..functions.linear_spec import IDENTITY, UNQUANTIZED, ProductQuantizers
from ..quantization.family import find_family
from ..tensor.quantizer import Calibrating, Quantizer

# Product slots, in the original's order, on which delayed-scaling checkpoints rely.
FORWARD_SLOTS = 3  # input, weight, output
BACKWARD_SLOTS = 2  # grad_output, grad_input


class ModuleRecipe:
    """Settings for one module: quantizers for its products, and the recipe's options for products and backward.

    Attributes:
        recipe: The recipe; None if nothing is quantized.
        group: Process group for amax reductions, or None.
        quantizes: Whether products are quantized. Otherwise all quantizers are the identity or only record.
        has_state: Whether scales or statistics persist between calls.
        follows_history: Whether forward-pass scales have changed by the backward pass.
    """

    def __init__(
        self,
        products: tuple[ProductQuantizers, ...],
        recipe: Recipe | None = None,
        group: Any = None,
        quantizes: bool = False,
    ):
        self.products = products
        # The same for calls whose shapes the recipe's format does not support.
        self.unquantized_products = (UNQUANTIZED,) * len(products)
        self.recipe = recipe
        self.revision = recipe_revision(recipe)
        self.group = group
        self.quantizes = quantizes
        family = find_family(recipe) if quantizes and recipe is not None else None
        self.has_state = family is not None and family.stateful
        self.follows_history = family is not None and family.follows_history
        # The same in high precision, recording statistics.
        self.calibrating: ModuleRecipe | None = None
        # State registration for scale updates, as long as it is valid.
        self.pools: object = None

    @staticmethod
    def of(
        recipe: Recipe, group: Any, forward: Sequence[Quantizer], backward: Sequence[Quantizer]
    ) -> ModuleRecipe:
        """Return the settings for a recipe with the given quantizers by slot."""
        products = tuple(
            ProductQuantizers(
                *forward[FORWARD_SLOTS * i : FORWARD_SLOTS * (i + 1)],
                *backward[BACKWARD_SLOTS * i : BACKWARD_SLOTS * (i + 1)],
            )
            for i in range(len(forward) // FORWARD_SLOTS)
        )
        result = ModuleRecipe(products, recipe, group, quantizes=True)
        # Products that stay in high precision and record statistics.
        calibrating = tuple(
            ProductQuantizers(
                Calibrating(p.input), Calibrating(p.weight), IDENTITY, IDENTITY, IDENTITY
            )
            for p in products
        )
        result.calibrating = ModuleRecipe(calibrating, recipe, group)
        return result

    def __getstate__(self) -> dict[str, Any]:
        """Copy without the registration for scale updates; the states of the copy are registered separately."""
        return self.__dict__ | {"pools": None}

    def with_products(
        self,
        products: tuple[ProductQuantizers, ...],
        unquantized_products: tuple[ProductQuantizers, ...] | None = None,
    ) -> ModuleRecipe:
        """Return the recipe with other quantizers, by default without a change for unquantized products."""
        result = copy.copy(self)
        result.products = products
        if unquantized_products is not None:
            result.unquantized_products = unquantized_products
        return result

    def replace_recipe(self, recipe: Recipe) -> None:
        """Follow an equal recipe from now on; the states are registered for scale updates again."""
        self.recipe, self.revision, self.pools = recipe, recipe_revision(recipe), None

    def matches_recipe(self, recipe: Recipe, group: Any) -> bool:
        """Return whether this was created from the recipe or from an equal one."""
        made_by = self.recipe
        return (
            made_by is not None
            and is_unchanged(made_by, self.revision, recipe)
            and self.group is group
        )


@functools.cache
def unquantized(products: int) -> ModuleRecipe:
    """Return the settings for a call outside autocast."""
    return ModuleRecipe((UNQUANTIZED,) * products)
