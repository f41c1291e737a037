"""model(x) under te.autocast(recipe), by hooks; and layers that are recomputed under it as they ran the first time."""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ....common.recipe import Recipe
from ...distributed import checkpoint
from ...quantization import autocast
from ...quantization.autocast import current
from .hooks import drop_hooks


class _Open(threading.local):
    """The blocks that forwards of this thread are in, the innermost last."""

    def __init__(self) -> None:
        self.blocks: list[autocast | None] = []


_open = _Open()


def enter_recipe(decoder: nn.Module, recipe: Recipe | None) -> None:
    """Run every forward of a decoder under a recipe's block; None: under whatever block its caller is in."""
    decoder.register_forward_pre_hook(Enters(recipe), prepend=True)
    decoder.register_forward_hook(Leaves(), always_call=True)


def leave_recipe(decoder: nn.Module) -> None:
    """Undo `enter_recipe`."""
    drop_hooks(decoder._forward_pre_hooks, lambda hook: isinstance(hook, Enters))
    for number in drop_hooks(decoder._forward_hooks, lambda hook: isinstance(hook, Leaves)):
        decoder._forward_hooks_always_called.pop(number, None)


@dataclass(frozen=True)
class Enters:
    """Before a forward."""

    recipe: Recipe | None

    def __call__(self, decoder: nn.Module, args: tuple[Any, ...]) -> None:
        _open.blocks.append(None)
        if self.recipe is not None:
            block = autocast(recipe=self.recipe)
            block.__enter__()
            _open.blocks[-1] = block
        if decoder.training:
            recompute_as_before(decoder)


@dataclass(frozen=True)
class Leaves:
    """Behind a forward, also one that raised: no state moves on then."""

    def __call__(self, decoder: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        block = _open.blocks.pop()
        if block is not None:
            block.__exit__(RuntimeError if output is None else None, None, None)


def recompute_as_before(decoder: nn.Module) -> None:
    """Have torch's checkpoint of a layer repeat scales and recipe: te.checkpoint with the same options.

    ValueError for another function under a recipe: its second run would be in high precision.
    """
    for layer in decoder.layers:  # pyright: ignore[reportGeneralTypeIssues]
        function = getattr(layer, "_gradient_checkpointing_func", None)
        if not layer.gradient_checkpointing or not isinstance(function, functools.partial):
            continue
        if function.func is torch_checkpoint:
            layer._gradient_checkpointing_func = functools.partial(checkpoint, **function.keywords)
        elif function.func is not checkpoint and current().enabled:
            raise ValueError(
                f"gradient checkpointing by {function.func.__qualname__} does not repeat a recipe in the backward; "
                "call gradient_checkpointing_enable() without offload=True"
            )
