"""Hooks on converted models: finding and removing them, rotary angles, and a decoder's forward recipe.

Hooks are found by their type, because handles do not survive copying the module. The fused rotation
reads float32 angles [1 | b, s, d] = atan2(sin, cos), where cos^2 + sin^2 = scale^2.

The library computes all frequency scaling (linear, dynamic, llama3, yarn, longrope) in float32; its
attention factor is the scale.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ....common.recipe import Recipe
from ...distributed import checkpoint
from ...quantization import autocast
from ...quantization.autocast import current
from ...runtime.checks import MODULE_HOOKS, PARAMETER_HOOKS

# The module with transformers' recorders for hidden states and attentions, and the flag on a model that has them.
_RECORDERS, _RECORDS = "transformers.utils.output_capturing", "_output_capturing_hooks_installed"


def drop_hooks(hooks: MutableMapping[int, Any], is_ours: Callable[[Any], bool]) -> list[int]:
    """Remove the hooks of a module that satisfy `is_ours` and return their ids."""
    numbers = [number for number, hook in hooks.items() if is_ours(hook)]
    for number in numbers:
        del hooks[number]
    return numbers


def find_hooked(module: nn.Module) -> Iterator[str]:
    """Iterate over submodules and parameters with a hook other than transformers' recorders."""
    for name, part in module.named_modules():
        if any(
            not _is_recorder(hook) for kind in MODULE_HOOKS for hook in getattr(part, kind).values()
        ):
            yield name
    for name, parameter in module.named_parameters():
        if any(getattr(parameter, kind, None) for kind in PARAMETER_HOOKS):
            yield name


def renew_recorders(model: nn.Module) -> None:
    """Remove transformers' recorders, which it installs again in the next forward pass, also in new layers."""
    for module in model.modules():
        drop_hooks(module._forward_hooks, _is_recorder)
        if getattr(module, _RECORDS, False):
            setattr(module, _RECORDS, False)


def _is_recorder(hook: Any) -> bool:
    return getattr(hook, "__module__", None) == _RECORDERS


class Turns(NamedTuple):
    """Angles float32 [1 | b, s, d] per token, and a factor for queries and keys."""

    angles: Tensor
    scale: float


def return_angles(rotary: nn.Module) -> None:
    """Make a transformers rotary embedding return Turns, until `return_cosines`."""
    rotary.register_forward_pre_hook(_cast_to_float32, with_kwargs=True)
    rotary.register_forward_hook(_turns)


def return_cosines(rotary: nn.Module) -> None:
    """Undo `return_angles`."""
    for number in drop_hooks(rotary._forward_pre_hooks, lambda hook: hook is _cast_to_float32):
        rotary._forward_pre_hooks_with_kwargs.pop(number, None)
    drop_hooks(rotary._forward_hooks, lambda hook: hook is _turns)


def _cast_to_float32(
    rotary: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Replace the first argument, whose dtype and device alone are used, by a float32 tensor."""
    hidden, *rest = args
    return (hidden.new_empty(0, dtype=torch.float32), *rest), kwargs


def _turns(rotary: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> Turns:
    cosine, sine = output
    return Turns(torch.atan2(sine, cosine), float(rotary.attention_scaling))  # pyright: ignore[reportArgumentType]


class _ActiveBlocks(threading.local):
    """The autocast blocks for the running forward passes in this thread, the innermost last."""

    def __init__(self) -> None:
        self.blocks: list[autocast | None] = []


_active = _ActiveBlocks()


def enter_recipe(decoder: nn.Module, recipe: Recipe | None) -> None:
    """Run every forward of a decoder under autocast with a recipe; None: under the caller's autocast."""
    decoder.register_forward_pre_hook(EnterRecipe(recipe), prepend=True)
    decoder.register_forward_hook(LeaveRecipe(), always_call=True)


def leave_recipe(decoder: nn.Module) -> None:
    """Undo `enter_recipe`."""
    drop_hooks(decoder._forward_pre_hooks, lambda hook: isinstance(hook, EnterRecipe))
    for number in drop_hooks(decoder._forward_hooks, lambda hook: isinstance(hook, LeaveRecipe)):
        decoder._forward_hooks_always_called.pop(number, None)


@dataclass(frozen=True)
class EnterRecipe:
    """Pre-hook that enters autocast."""

    recipe: Recipe | None

    def __call__(self, decoder: nn.Module, args: tuple[Any, ...]) -> None:
        _active.blocks.append(None)
        if self.recipe is not None:
            block = autocast(recipe=self.recipe)
            block.__enter__()
            _active.blocks[-1] = block
        if not decoder.training:
            return
        # torch's checkpoint around a layer becomes te.checkpoint, whose second run repeats scales and recipe.
        for layer in decoder.layers:  # pyright: ignore[reportGeneralTypeIssues]
            function = getattr(layer, "_gradient_checkpointing_func", None)
            if not layer.gradient_checkpointing or not isinstance(function, functools.partial):
                continue
            if function.func is torch_checkpoint:
                layer._gradient_checkpointing_func = functools.partial(
                    checkpoint, **function.keywords
                )
            elif function.func is not checkpoint and current().enabled:
                raise ValueError(
                    f"gradient checkpointing by {function.func.__qualname__} does not repeat a recipe in the backward; "
                    "call gradient_checkpointing_enable() without offload=True"
                )


@dataclass(frozen=True)
class LeaveRecipe:
    """Hook that leaves autocast, also after an exception; then no state is updated."""

    def __call__(self, decoder: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        block = _active.blocks.pop()
        if block is not None:
            block.__exit__(RuntimeError if output is None else None, None, None)
