"""quantized_model_init: modules created inside a block store their weights quantized from the start."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

from ...common.checks import suggests_keywords
from ...common.numbers import to_bool
from ...common.recipe import Recipe
from ..runtime.tracing import warn_deprecated
from .support import check_block, check_recipe_support, default_recipe


@dataclass(frozen=True)
class ModelInitState:
    """Settings of the innermost block, as module constructors read them."""

    enabled: bool = False
    recipe: Recipe | None = None
    preserve_high_precision_init_val: bool = False


_OUTSIDE = ModelInitState()


# A block belongs to the thread that entered it, and to tasks and threads in a copy of its context.
_entered: ContextVar[ModelInitState] = ContextVar("transformer_engine_model_init", default=_OUTSIDE)


def current_model_init() -> ModelInitState:
    """Return the record of the innermost block; outside all blocks, a record that is not enabled."""
    return _entered.get()


def reset() -> None:
    """Drop all blocks in this context, also open ones."""
    _entered.set(_OUTSIDE)


class quantized_model_init:
    """Context manager: layers that are created inside store their weights quantized.

    Args:
        enabled: Quantize the weights.
        recipe: A recipe instance, by default `get_default_recipe()`.
        preserve_high_precision_init_val: Keep the initial values on the CPU until an optimizer has fetched them.

    Raises:
        TypeError: An argument has the wrong type.
        RuntimeError: On entry, the machine does not support the recipe.

    Example:
        >>> import transformer_engine.pytorch as te
        >>> from transformer_engine.common import recipe
        >>> with te.quantized_model_init(recipe=recipe.Float8CurrentScaling()):
        ...     layer = te.Linear(32, 32, device="cpu")
        >>> isinstance(layer.weight, te.QuantizedTensor)
        True
    """

    @suggests_keywords
    def __init__(
        self,
        enabled: bool = True,
        recipe: Recipe | None = None,
        preserve_high_precision_init_val: bool = False,
    ):
        enabled = check_block(enabled, recipe)
        preserve = to_bool("preserve_high_precision_init_val", preserve_high_precision_init_val)
        if recipe is None and enabled:
            recipe = default_recipe()
        self._state = ModelInitState(enabled, recipe, preserve)
        self._outer: ModelInitState | None = None

    def __enter__(self) -> None:
        if self._outer is not None:
            raise RuntimeError("this block is active already; create one for every with statement")
        recipe = self._state.recipe
        if self._state.enabled and recipe is not None:
            supported, reason = check_recipe_support(recipe)
            if not supported:
                raise RuntimeError(f"{type(recipe).__name__} cannot run here: {reason}")
        self._outer = _entered.get()
        _entered.set(self._state)

    def __exit__(self, *exception: object) -> None:
        assert self._outer is not None, "left without having been entered"
        _entered.set(self._outer)
        self._outer = None


@suggests_keywords
def fp8_model_init(
    enabled: bool = True,
    recipe: Recipe | None = None,
    preserve_high_precision_init_val: bool = False,
) -> quantized_model_init:
    """Deprecated alias for `quantized_model_init`. The other arguments are as in `quantized_model_init`."""
    warn_deprecated("fp8_model_init", "quantized_model_init with the same arguments")
    return quantized_model_init(enabled, recipe, preserve_high_precision_init_val)
