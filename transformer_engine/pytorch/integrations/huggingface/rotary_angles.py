"""(cos, sin) of transformers' rotary embedding as the float32 angles [1 | b, s, d] that the fused rotation takes.

    angles = atan2(sin, cos),   cos^2 + sin^2 = scale^2

Whatever stretches frequencies (linear, dynamic, llama3, yarn, longrope) is computed by the library; its factor of
attention is the scale. The library is asked in float32, so that nothing is rounded to the dtype of the layers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .hooks import drop_hooks


class Turns(NamedTuple):
    """angles float32 [1 | b, s, d] of each token; scale: a factor of queries and of keys."""

    angles: Tensor
    scale: float


def give_angles(rotary: nn.Module) -> None:
    """Have a rotary embedding of transformers answer with Turns, until `give_cosines`."""
    rotary.register_forward_pre_hook(_in_float32, with_kwargs=True)
    rotary.register_forward_hook(_turns)


def give_cosines(rotary: nn.Module) -> None:
    """Undo `give_angles`."""
    for number in drop_hooks(rotary._forward_pre_hooks, lambda hook: hook is _in_float32):
        rotary._forward_pre_hooks_with_kwargs.pop(number, None)
    drop_hooks(rotary._forward_hooks, lambda hook: hook is _turns)


def _in_float32(
    rotary: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """The first argument serves its dtype and device only."""
    hidden, *rest = args
    return (hidden.new_empty(0, dtype=torch.float32), *rest), kwargs


def _turns(rotary: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> Turns:
    cosine, sine = output
    return Turns(torch.atan2(sine, cosine), float(rotary.attention_scaling))  # pyright: ignore[reportArgumentType]
