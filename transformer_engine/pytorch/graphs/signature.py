"""Which calls one graph can serve: those with an equal signature, all that a capture would freeze but the values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...common import env
from ...common.recipe import description_of
from ..quantization.autocast import AutocastState
from ..runtime.device import autocast_dtype
from ..tensor.quantized_tensor import QuantizedTensorStorage

# What a leaf of the arguments may be beside a tensor: values that say all by being equal.
CONSTANTS = (type(None), bool, int, float, str, torch.dtype, torch.device)


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Leaves(NamedTuple):
    """The arguments of a call, (args, kwargs), in a row: `constants` has None where there is a tensor."""

    structure: pytree.TreeSpec
    tensors: tuple[Tensor, ...]
    positions: tuple[int, ...]
    constants: tuple[Any, ...]

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Leaves:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        positions = tuple([i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)])
        return Leaves(
            structure,
            tuple([leaves[i] for i in positions]),
            positions,
            tuple([None if isinstance(leaf, Tensor) else leaf for leaf in leaves]),
        )


class Standing(NamedTuple):
    """What a module is at the moment of a call, or why it cannot be captured.

    facts      its layers' settings and the places of its parameters and buffers, as parts of a key
    obstacle   a sentence; None: there is none
    """

    facts: tuple[Any, ...]
    obstacle: str | None


def obstacle_of(leaves: Leaves) -> str | None:
    """Why no graph could serve a call with these arguments."""
    for leaf in leaves.constants:
        if not isinstance(leaf, CONSTANTS):
            return f"an argument is a {type(leaf).__name__}, whose content a graph would keep as it is now"
    for tensor in leaves.tensors:
        if isinstance(tensor, QuantizedTensorStorage) or type(tensor) not in (Tensor, torch.nn.Parameter):
            return f"an argument is a {type(tensor).__name__}; graphs take plain tensors"
    return None


def standing_of(module: torch.nn.Module | None) -> Standing:
    """A module's standing, found by walking through it: nothing tells of a layer or a parameter that was replaced."""
    if module is None:
        return Standing((), None)
    facts: list[Any] = []
    waiting = [module]
    while waiting:
        layer = waiting.pop()
        own = layer.__dict__
        if layer is not module and any(own[kind] for kind in _HOOKS):
            return Standing((), f"a {type(layer).__name__} inside has hooks, which a replay would not call")
        if own.get("wgrad_store") is not None:
            return Standing((), f"a {type(layer).__name__} puts weight gradients off until its backward_dw()")
        facts.append((id(layer), own["training"], own.get("_config")))
        for tensor in (*own["_parameters"].values(), *own["_buffers"].values()):
            facts.append(None if tensor is None else (_place(tensor), tensor.requires_grad))
        waiting += [child for child in own["_modules"].values() if child is not None]
    return Standing(tuple(facts), None)


def _place(tensor: Tensor) -> Any:
    if isinstance(tensor, QuantizedTensorStorage):
        parts: Sequence[Tensor | None] = tensor.as_storage().flatten()[0]
        return tuple([None if part is None else part.data_ptr() for part in parts])
    return tensor.data_ptr()


def signature_of(leaves: Leaves, standing: Standing, state: AutocastState, caches: bool) -> tuple[Any, ...]:
    """The key of a call."""
    kinds = {tensor.device.type for tensor in leaves.tensors}
    return (
        leaves.structure,
        leaves.positions,
        tuple([(type(leaf), leaf) for leaf in leaves.constants]),
        tuple([(t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in leaves.tensors]),
        standing.facts,
        caches,
        (state.enabled, state.calibrating, type(state.recipe), description_of(state.recipe), state.group),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        tuple([autocast_dtype(kind) for kind in sorted(kinds)]),
        torch.are_deterministic_algorithms_enabled(),
        env.generation(),
    )
