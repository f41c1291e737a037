"""torch.nn modules that compute with this engine, and their conversion in place.

A converted module is the same object with another class, so that its parameters, hooks, name and state-dict keys, and
every reference to it, remain valid. The class derives from both the engine's layer and torch's.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....common.recipe import Recipe
from ...module import LayerNorm, Linear, RMSNorm
from ...module.numerics import new_tracing_key
from ...module.parameters import weight_and_bias
from ...quantization.autocast import autocast
from ...quantization.family import find_family
from ...quantization.model_init import quantized_model_init
from .traced import TracedRecipe, is_traced_as_torch, traced_linear, traced_recipe


class ConvertedLinear(Linear, nn.Linear):  # pyright: ignore[reportIncompatibleMethodOverride]
    """`torch.nn.Linear` under a recipe, or under the caller's autocast without one.

    A format multiplies rows in multiples of its alignment. Other row counts, such as the tokens of
    an expert, are padded with zeros, which change no scale.

    Equally sized layers share quantizers and the key of compiled graphs, so that `torch.compile`
    reuses the graph of a block for its repetitions. Sharing requires a recipe without history.
    """

    # State dict keys equal nn.Linear's.
    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state

    recipe: Recipe | None
    row_alignment: int
    prototype: Linear | None
    traced_recipe: TracedRecipe | None

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # the copy's prototype, which has the quantizers of the copied layers
        if self.prototype is not None:
            self.tracing_key = self.prototype.tracing_key

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Initialize the parameters as `torch.nn.Linear` does."""
        if not defer_init:
            nn.Linear.reset_parameters(self)

    def forward(self, input: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return y [.., out_features] for an input [.., in_features]."""
        if self.recipe is None:
            return Linear.forward(self, input)  # pyright: ignore[reportReturnType]
        rows = input.numel() // input.shape[-1]
        missing = -rows % self.row_alignment
        if not missing:
            return self._quantized(input)
        output = self._quantized(F.pad(input.reshape(rows, -1), (0, 0, 0, missing)))
        return output[:rows].reshape(*input.shape[:-1], output.shape[-1])

    def _quantized(self, x: Tensor) -> Tensor:
        """Compute y for an input whose row count is a multiple of the alignment."""
        if self.traced_recipe is not None and is_traced_as_torch(x, self.weight):
            return traced_linear(x, *weight_and_bias(self), self.traced_recipe)
        with autocast(recipe=self.recipe):
            return Linear.forward(self, x)  # pyright: ignore[reportReturnType]


class _ConvertedNorm:
    """Shared forward pass of converted norms."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalized input, under torch.autocast in torch's norm dtype."""
        device = input.device.type
        if not torch.is_autocast_enabled(device):
            return super().forward(input)  # pyright: ignore[reportAttributeAccessIssue]
        # torch's norms compute in float32 under autocast on GPUs, and in the dtype of the input on CPUs.
        dtype = torch.float32 if device == "cuda" else input.dtype
        with torch.autocast(device, enabled=False):
            return super().forward(input.to(dtype))  # pyright: ignore[reportAttributeAccessIssue]


class ConvertedLayerNorm(_ConvertedNorm, LayerNorm, nn.LayerNorm):  # pyright: ignore[reportIncompatibleMethodOverride]
    """`torch.nn.LayerNorm` with the kernels of `te.LayerNorm`."""


class ConvertedRMSNorm(_ConvertedNorm, RMSNorm, nn.RMSNorm):  # pyright: ignore[reportIncompatibleVariableOverride, reportIncompatibleMethodOverride]
    """`torch.nn.RMSNorm` with the kernels of `te.RMSNorm`."""


CONVERTED = (ConvertedLinear, ConvertedLayerNorm, ConvertedRMSNorm)
_ORIGINALS: dict[type, type] = {
    ConvertedLinear: nn.Linear,
    ConvertedLayerNorm: nn.LayerNorm,
    ConvertedRMSNorm: nn.RMSNorm,
}
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_BEFORE = "before_conversion"


class _Before(NamedTuple):
    """Names of a module before its conversion, and the attributes that the conversion added."""

    attributes: frozenset[str]
    parameters: frozenset[str]
    added: frozenset[str]


class Converter:
    """Converts modules in place under one recipe.

    Args:
        recipe: Linear layer recipe; None: the caller's autocast recipe.
    """

    def __init__(self, recipe: Recipe | None) -> None:
        self.recipe = recipe
        self.row_alignment = 1 if recipe is None else find_family(recipe).alignment(recipe)
        self.traced_recipe = traced_recipe(recipe)
        self._prototypes: dict[tuple[int, int, bool], Linear] = {}

    def convert(self, module: nn.Module) -> None:
        """Convert an `nn.Linear`, `nn.LayerNorm` or `nn.RMSNorm`; see `Eligibility` for the modules that qualify."""
        norms = {
            nn.LayerNorm: (LayerNorm, ConvertedLayerNorm),
            nn.RMSNorm: (RMSNorm, ConvertedRMSNorm),
        }
        with quantized_model_init(enabled=False):
            if type(module) is nn.Linear:
                self._convert_linear(module)
                return
            ours, converted = norms[type(module)]
            engine = ours(module.normalized_shape, eps=module.eps, device="meta")
        _change_class(module, converted, engine, {})

    def _convert_linear(self, module: nn.Linear) -> None:
        sizes = module.in_features, module.out_features, module.bias is not None
        engine = self._prototypes.get(sizes)
        if engine is None:
            engine = Linear(sizes[0], sizes[1], bias=sizes[2], device="meta")
        shared = self.recipe is not None
        if shared:
            self._prototypes[sizes] = engine
        # The prototype is an attribute, but no submodule: state dicts and parameters exclude it.
        attributes = {
            "recipe": self.recipe,
            "row_alignment": self.row_alignment,
            "prototype": engine if shared else None,
            "traced_recipe": self.traced_recipe,
        }
        _change_class(module, ConvertedLinear, engine, attributes)
        if not shared:
            vars(module)["tracing_key"] = new_tracing_key(module)  # pyright: ignore[reportArgumentType]


def _change_class(
    module: nn.Module, cls: type[nn.Module], engine: nn.Module, attributes: dict[str, Any]
) -> None:
    """Change a module's class, and add the attributes of an engine layer with the same settings."""
    for name, value in vars(engine).items():
        if name not in _OF_EVERY_MODULE:
            attributes[name] = copy.copy(value) if isinstance(value, (list, set, dict)) else value
    before = _Before(frozenset(vars(module)), frozenset(module._parameters), frozenset(attributes))
    vars(module).update(attributes | {_BEFORE: before})
    for name in engine._parameters:
        module._parameters.setdefault(name, None)  # the bias that te.RMSNorm registers as None
    module.__class__ = cls


def restore_module(module: nn.Module) -> None:
    """Restore the class of a converted module, and remove the attributes that its conversion added."""
    attributes, cls = vars(module), type(module)
    before: _Before = attributes.pop(_BEFORE)
    for name in set(attributes) - before.attributes:
        # The engine adds attributes when it runs, too. Attributes of callers, which its class does not know, remain.
        if name in before.added or hasattr(cls, name):
            del attributes[name]
    for name in set(module._parameters) - before.parameters:
        if module._parameters[name] is None:
            del module._parameters[name]
    # Operations of the engine count writes to their attributes in another attribute.
    object.__setattr__(module, "__class__", _ORIGINALS[cls])
