"""Which modules `te.convert` may convert, and the reasons for all others."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ....common.checks import described
from ....common.numbers import with_article
from ....common.recipe import Recipe
from ...functions.linear_spec import unsupported_product_reason
from ...module import Linear
from ...quantization.autocast import AutocastState
from ...quantization.family import find_family
from ...runtime.checks import MODULE_HOOKS, is_distributed
from .layers import CONVERTED

Filter = str | Sequence[str] | Callable[[str, nn.Module], bool] | None

CONVERTIBLE = (nn.Linear, nn.LayerNorm, nn.RMSNorm)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def matches(rule: Filter, name: str, module: nn.Module) -> bool:
    """Whether a filter selects a module; patterns follow `fnmatch` for the whole name."""
    if rule is None:
        return False
    if callable(rule):
        return bool(rule(name, module))
    patterns = [rule] if isinstance(rule, str) else rule
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def passes_filters(name: str, module: nn.Module, include: Filter, exclude: Filter) -> bool:
    """Whether `include` selects a module (None: all) and `exclude` does not."""
    included = include is None or matches(include, name, module)
    return included and not matches(exclude, name, module)


def check_filter(argument: str, rule: Filter) -> None:
    """Raise TypeError for a filter that is neither patterns nor a function."""
    patterns = isinstance(rule, Sequence) and all(isinstance(pattern, str) for pattern in rule)
    if not (rule is None or callable(rule) or patterns):
        raise TypeError(
            f"{argument}={described(rule)}; give a pattern such as 'layers.*', a list of patterns, or a function "
            "(name, module) -> bool"
        )


def check_recipe(recipe: Recipe | None) -> None:
    """Raise ValueError for a recipe with history, which an nn.Linear's state dict keys cannot hold."""
    if recipe is not None and find_family(recipe).follows_history:
        raise ValueError(
            f"{type(recipe).__name__} keeps a history of maxima, and a converted model keeps the state-dict keys of "
            "the original, which have no place for it; use Float8CurrentScaling or another recipe without history, "
            "or convert with recipe=None and save the states yourself"
        )


def find_tied_parameters(model: nn.Module) -> dict[int, list[str]]:
    """Names of modules that share a parameter, by the parameter's id."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(name)
    return {key: names for key, names in owners.items() if len(names) > 1}


class Eligibility:
    """Rules of one conversion.

    Args:
        model: The model.
        recipe: Linear layer recipe.
        include: Filter for modules to convert; None: all.
        exclude: Filter for modules to leave.
    """

    def __init__(
        self, model: nn.Module, recipe: Recipe | None, include: Filter, exclude: Filter
    ) -> None:
        self.recipe, self.include, self.exclude = recipe, include, exclude
        self._tied = find_tied_parameters(model)

    def unsupported_reason(self, name: str, module: nn.Module) -> str | None:
        """Reason to leave a Linear or norm as it is, independently of its inputs; None if it can be converted."""
        if self.include is not None and not matches(self.include, name, module):
            return "not selected by include"
        if matches(self.exclude, name, module):
            return "excluded"
        reason = _modification_reason(module)
        if reason is not None:
            return reason
        weight: Any = module._parameters.get("weight")
        if weight is None:
            return "no weight parameter"
        if not _is_plain(weight):
            return (
                f"its weight is {with_article(type(weight))}, which is quantized or wrapped already"
            )
        if weight.dtype not in _DTYPES:
            return f"its weight is {weight.dtype}; float32, bfloat16 and float16 are converted"
        tied_names = [other for other in self._tied.get(id(weight), ()) if other != name]
        if tied_names:
            return f"shares its weight with {', '.join(tied_names)}"
        if isinstance(module, nn.LayerNorm) and module.bias is None:
            return "LayerNorm without a bias, which te.LayerNorm does not have"
        if isinstance(module, nn.RMSNorm) and module.eps is None:
            return "eps=None depends on the input's dtype; set a number"
        if self.recipe is not None and isinstance(module, nn.Linear):
            return format_reason(self.recipe, module.in_features, module.out_features)
        return None


def _modification_reason(module: nn.Module) -> str | None:
    """Reason to leave a module whose computation differs from its torch.nn class."""
    if type(module) in CONVERTED:
        return "converted already"
    if isinstance(module, CONVERTED):
        return f"{type(module).__name__} is a sharded or derived form of a converted module"
    if torch.nn.utils.parametrize.is_parametrized(module):
        return "parametrized"
    if type(module).__bases__[-1] in CONVERTIBLE and hasattr(module, "set_reshard_after_forward"):
        return "fully_shard was applied to this module itself; convert the model before"
    if type(module) not in CONVERTIBLE:
        return f"{type(module).__name__} is a subclass of {_base(module)}, which may compute something else"
    if "forward" in vars(module):
        return "its forward was replaced"
    if any(getattr(module, kind, None) for kind in MODULE_HOOKS):
        return "has hooks, which may depend on its computation"
    return None


def _base(module: nn.Module) -> str:
    return next(kind.__name__ for kind in CONVERTIBLE if isinstance(module, kind))


def _is_plain(weight: Tensor) -> bool:
    """Whether a parameter holds values: a plain tensor, or a DTensor over plain tensors."""
    local: Any = weight.to_local() if is_distributed(weight) else weight  # pyright: ignore
    return type(local) in (Tensor, nn.Parameter)


def format_reason(recipe: Recipe, in_features: int, out_features: int) -> str | None:
    """Reason why a recipe's formats do not support a layer's sizes; rows are padded, so any number fits."""
    for size, value in (("in_features", in_features), ("out_features", out_features)):
        if value % 16:
            return f"{size}={value} is not divisible by 16, which FP8 products require"
    rows = find_family(recipe).alignment(recipe)
    layer = Linear(in_features, out_features, bias=False, device="meta")
    state = AutocastState(enabled=True, recipe=recipe)
    (product,) = layer._product_quantizers(state)
    return unsupported_product_reason(product.operands, rows, in_features, out_features)


def candidates(model: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    """Names and modules in the model that derive from nn.Linear, nn.LayerNorm or nn.RMSNorm, each module once."""
    return [
        (name, module) for name, module in model.named_modules() if isinstance(module, CONVERTIBLE)
    ]
