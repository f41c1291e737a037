"""A module's call in a function that runs twice: its scales are replayed exactly, or the call is rejected."""

from __future__ import annotations

import warnings

import torch

from ..distributed.recompute import is_fp8_activation_recompute_enabled
from ..functions.linear_spec import ProductQuantizers
from ..functions.scale_update import is_backward_pass
from ..quantization.recompute_states import replay_quantizers
from .products import ModuleRecipe


def may_be_recomputed() -> bool:
    """Return whether this call is in a recomputed function, or in a backward pass, where it may be a second run."""
    # Compiled code has no graph task to query.
    return is_fp8_activation_recompute_enabled() or (
        not torch.compiler.is_compiling() and is_backward_pass()
    )


def repeatable(kind: str, tracing_key: str, active: ModuleRecipe) -> ModuleRecipe:
    """Return the settings for a call in a recomputed function: first runs record their states, second runs replay them.

    Any other call in a backward pass keeps its quantizers. It warns if another library's checkpoint repeats the call.

    Args:
        kind: Module class name, for messages.
        tracing_key: Module key.
        active: Call settings.

    Raises:
        RuntimeError: The second run calls the module more often than the first one.
    """
    if not is_fp8_activation_recompute_enabled():
        # A checkpoint from another library repeats the autocast, but scales may have been updated since its first run.
        if "Checkpoint" in type(torch._C._current_autograd_node()).__name__:
            warnings.warn(
                f"a checkpoint that does not keep the scales of delayed scaling runs {kind} again: where they have "
                "moved since its first run, the gradients are of another function; use torch.utils.checkpoint or "
                "transformer_engine.pytorch.checkpoint, which repeat them, or a recipe without history",
                stacklevel=3,
            )
        return active
    forward = [product.forward for product in active.products]
    repeated = replay_quantizers(kind, tracing_key, forward)
    if repeated is forward:
        return active
    products = tuple(
        [
            ProductQuantizers(
                x, weight, y, product.grad_output, product.grad_input, inspector=product.inspector
            )
            for (x, weight, y), product in zip(repeated, active.products, strict=True)
        ]
    )
    recipe = ModuleRecipe(products, active.recipe, active.group, quantizes=True)
    recipe.unquantized_products = active.unquantized_products
    return recipe
