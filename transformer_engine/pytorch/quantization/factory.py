"""quantizers = make_quantizers(recipe, ...), and the alignment of grouped inputs: its family's answers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...common.recipe import Recipe
from ..tensor.quantizer import Quantizer
from .family import family_of
from .recipe_state import RecipeState
from .roles import QuantizerRole


def make_quantizers(
    recipe: Recipe,
    mode: str,
    count: int,
    device: torch.device,
    state: RecipeState | None,
    roles: Sequence[QuantizerRole | None] | None = None,
) -> list[Quantizer]:
    """One quantizer a slot; state is that of the same arguments, None makes one that nothing else holds."""
    family_of(recipe)
    if state is None:
        state = RecipeState.create(recipe, mode=mode, num_quantizers=count, device=device, roles=roles)
    return state.make_quantizers()


def get_align_size_for_quantization(recipe: Recipe) -> int:
    """Rows of a group are padded to a multiple of this before quantization."""
    return family_of(recipe).alignment(recipe)
