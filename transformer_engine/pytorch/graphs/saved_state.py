"""state_restored: saves and restores the state that warm-up runs change, so that they do not count as steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..distributed.rng import get_all_rng_states
from ..module.base import TransformerEngineBaseModule
from ..module.weight_cache import weight_parts
from ..ops.recipe_slots import RecipeSlots
from ..quantization import delayed_scaling
from ..runtime.device import has_cuda

_ADDED_FLAG = "grad_added_to_main_grad"  # of a parameter, by its backward
_DIRECTIONS = ("scaling_fwd", "scaling_bwd")


@dataclass(frozen=True)
class _Scales:
    """The delayed-scaling states of a module in one direction, and copies of their values."""

    module: TransformerEngineBaseModule | RecipeSlots
    direction: str
    states: tuple[Any, ...]
    copies: tuple[tuple[Tensor, Tensor], ...]

    @staticmethod
    def of(module: TransformerEngineBaseModule | RecipeSlots, direction: str) -> _Scales:
        states = find_delayed_states(module, direction)
        copies = tuple((state.scale.clone(), state.amax_history.clone()) for state in states)
        return _Scales(module, direction, states, copies)

    def restore(self) -> None:
        """Restore the values; states that were created since are reset and inherit from those they replace."""
        for state, (scale, history) in zip(self.states, self.copies, strict=True):
            state.scale.copy_(scale)
            state.amax_history.copy_(history)
        states = find_delayed_states(self.module, self.direction)
        for number, state in enumerate(states):
            if any(state is restored for restored in self.states):
                continue
            state.scale.fill_(1.0)
            state.amax_history.zero_()
            if number < len(self.states):
                state.inherit(self.states[number])


def find_delayed_states(
    layer: TransformerEngineBaseModule | RecipeSlots, direction: str
) -> tuple[Any, ...]:
    """Return the delayed-scaling states of a layer or operation in a direction, "scaling_fwd" or "scaling_bwd"."""
    if isinstance(layer, RecipeSlots):
        return layer.delayed_states("forward" if direction == "scaling_fwd" else "backward")
    return layer.numerics.delayed_states(direction)


@dataclass(frozen=True)
class _Values:
    """Tensors that are modified in place, and copies of their values."""

    tensors: tuple[Tensor, ...]
    copies: tuple[Tensor, ...]

    @staticmethod
    def of(tensors: Iterable[Tensor]) -> _Values:
        values = tuple(tensors)
        return _Values(values, tuple(tensor.detach().clone() for tensor in values))

    def restore(self) -> None:
        with torch.no_grad():
            for tensor, copy in zip(self.tensors, self.copies, strict=True):
                tensor.copy_(copy)


class _RandomStates:
    """All random states; the generator objects, which graphs register, are not replaced."""

    def __init__(self) -> None:
        self.cpu = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state() if has_cuda() else None
        states = get_all_rng_states()
        self.generators = [
            (state, state.get_state())
            for state in states.values()
            if isinstance(state, torch.Generator)
        ]
        self.tensors = {
            name: state.clone() for name, state in states.items() if isinstance(state, Tensor)
        }

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)
        for generator, state in self.generators:
            generator.set_state(state)
        states = get_all_rng_states()
        for name, state in self.tensors.items():
            states[name] = state


def _accumulators(module: torch.nn.Module) -> Iterator[Tensor]:
    """Iterate over the buffers that accumulate fused weight gradients."""
    for layer in module.modules():
        if getattr(layer, "fuse_wgrad_accumulation", False) or getattr(
            layer, "_accumulate_into_main_grad", False
        ):
            for parameter in layer.parameters(recurse=False):
                main_grad = getattr(parameter, "main_grad", None)
                if isinstance(main_grad, Tensor):
                    yield main_grad


@contextmanager
def state_restored(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Restore scales, buffers, cached weights, gradients and random states after the block."""
    roots = list(modules)
    layers = {id(layer): layer for root in roots for layer in root.modules()}.values()
    scales = [
        _Scales.of(layer, direction)
        for layer in layers
        if isinstance(layer, (TransformerEngineBaseModule, RecipeSlots))
        for direction in _DIRECTIONS
    ]
    buffers = _Values.of(buffer for root in roots for buffer in root.buffers())
    sums = _Values.of({id(t): t for root in roots for t in _accumulators(root)}.values())
    workspaces = [
        workspace
        for layer in layers
        if isinstance(layer, TransformerEngineBaseModule)
        for workspace in layer.numerics.workspaces.values()
    ]
    weights = _Values.of(
        part for workspace in workspaces for part in weight_parts(workspace)[0] if part is not None
    )
    # Scales of other modules too: an autocast inside a module ends with an update for all modules.
    pooled = [state for pool in delayed_scaling.registry.pools.values() for state in pool.states]
    pooled_scales = _Values.of(
        tensor for state in pooled for tensor in (state.scale_in_place, state.amax_history)
    )
    gradients = [(parameter, parameter.grad) for root in roots for parameter in root.parameters()]
    flagged = [p for root in roots for p in root.parameters() if hasattr(p, _ADDED_FLAG)]
    flags = [getattr(p, _ADDED_FLAG) for p in flagged]
    random = _RandomStates()
    try:
        yield
    finally:
        random.restore()
        for saved in (pooled_scales, *scales, buffers, sums, weights):
            saved.restore()
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for parameter, value in zip(flagged, flags, strict=True):
            setattr(parameter, _ADDED_FLAG, value)
