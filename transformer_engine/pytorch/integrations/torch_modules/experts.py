"""grouped_mm of a module with stacked experts, computed by GroupedLinear while the module's forward pass runs."""

from __future__ import annotations

import functools
from collections import Counter
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ....common.recipe import Recipe
from ...module import GroupedLinear
from ...quantization.autocast import autocast
from ...quantization.model_init import quantized_model_init
from ..huggingface.injection import ForwardWrapper
from .eligibility import format_reason
from .grouped_calls import GROUPED_PRODUCTS, unsupported_call
from .sample import SampleCall
from .timing import Comparison, sum_costs, time_functions


class EngineExperts(TorchFunctionMode):
    """Computes torch's grouped_mm by GroupedLinear; calls that it does not support run in torch.

    Args:
        recipe: Recipe for the products; None: the caller's autocast recipe.
    """

    def __init__(self, recipe: Recipe | None) -> None:
        super().__init__()
        self.recipe = recipe
        self.layers: dict[tuple[int, ...], GroupedLinear] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in GROUPED_PRODUCTS:
            return func(*args, **kwargs)
        if unsupported_call(*args, **kwargs) is not None:
            return func(*args, **kwargs)
        return self.multiply(*args, **kwargs)

    def multiply(self, x: Tensor, weight: Tensor, offs: Tensor, **_: Any) -> Tensor:
        """Compute y [S, N] for rows x [S, K], experts [E, K, N] and ends of their rows [E].

        Rows after the last end are undefined, as in torch.
        """
        layer = self._layer(tuple(weight.shape))
        splits = torch.diff(offs, prepend=offs.new_zeros(1)).to(torch.int64)
        rows = x.shape[0]
        if not x.is_cuda:  # GroupedLinear compares the row count with the splits
            x = x[: int(offs[-1])]
        tensors = (weight.mT, *[None] * len(layer._config.bias_names))
        with nullcontext() if self.recipe is None else autocast(recipe=self.recipe):
            y: Any = layer._compute_output(
                x, layer._accept_splits(x, splits), None, _NO_BUFFERS, tensors
            )
        return y if y.shape[0] == rows else F.pad(y, (0, 0, 0, rows - y.shape[0]))

    def _layer(self, shape: tuple[int, ...]) -> GroupedLinear:
        """A layer without memory, whose single weight is an argument of each call."""
        if shape not in self.layers:
            experts, depth, width = shape
            with quantized_model_init(enabled=False):
                layer = GroupedLinear(
                    experts, depth, width, bias=False, params_dtype=torch.bfloat16, device="meta"
                )
            layer.make_grouped_weights()
            self.layers[shape] = layer
        return self.layers[shape]


_NO_BUFFERS = (None, None)


class InjectedExperts(ForwardWrapper):
    """A module's forward with torch's grouped_mm replaced by `EngineExperts`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.forward(*args, **kwargs)
        with self.replacement:
            return self.forward(*args, **kwargs)


def convert_experts(module: Any, recipe: Recipe | None) -> None:
    """Replace torch's grouped_mm in the forward pass of a module."""
    module.forward = InjectedExperts(module.forward, EngineExperts(recipe)).__call__


def has_engine_experts(module: nn.Module) -> bool:
    """Whether `convert_experts` converted a module."""
    return isinstance(getattr(vars(module).get("forward"), "__self__", None), InjectedExperts)


def restore_experts(module: nn.Module) -> None:
    """Undo `convert_experts`."""
    del vars(module)["forward"]


def unsupported_sizes(recipe: Recipe | None, calls: Counter[SampleCall]) -> str | None:
    """Reason why a recipe does not support the experts' sizes."""
    if recipe is None:
        return None
    reasons = (format_reason(recipe, *call.shapes[1][1:]) for call in calls)
    return next((reason for reason in reasons if reason is not None), None)


def compare_experts(recipe: Recipe | None, calls: Counter[SampleCall]) -> Comparison:
    """Time torch's grouped_mm and the engine's products with equal numbers of rows per expert."""
    costs = []
    for call, count in calls.items():
        rows, experts = call.shapes[0][0], call.shapes[1][0]
        ends = torch.arange(1, experts + 1, device=call.device) * rows // experts
        functions = [
            functools.partial(_multiply, function, ends.to(torch.int32))
            for function in (GROUPED_PRODUCTS[0], EngineExperts(recipe).multiply)
        ]
        stored = call._replace(shapes=(call.shapes[0], (experts, *call.shapes[1][:0:-1])))
        costs.append((count, time_functions(functions, stored)))
    return sum_costs(costs)


def _multiply(function: Any, offs: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return function(x, weight.mT, offs=offs)
