"""Block: a callable with tensors that stay in their places, and its passes as bodies that a recorder can record.

    forward           outputs = callable(inputs), under the autocast that it is captured with
    backward          gradients of inputs and parameters, of static gradients of the outputs
    weight_gradients  what delay_wgrad_compute=True has put off

Bodies read and write the same tensors every time. They change nothing that a replay would not: scales are updated by
whoever replays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..functions.scale_update import left_to_caller
from ..module.base import TransformerEngineBaseModule
from ..module.linear_base import ProductsModule
from ..ops.basic import GroupedLinear as GroupedOperation
from ..quantization.autocast import AutocastState, autocast
from .caching import called_as, flagged, layers_with_weights, microbatch


@dataclass(frozen=True)
class Outputs:
    """The structure of what a callable returned, its leaves that are no tensors, and which of the others have a
    gradient."""

    structure: pytree.TreeSpec
    constants: tuple[Any, ...]
    differentiable: tuple[bool, ...]

    @staticmethod
    def of(leaves: Sequence[Any], structure: pytree.TreeSpec) -> Outputs:
        return Outputs(
            structure,
            tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves),
            tuple(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves),
        )

    def of_tensors(self, tensors: Sequence[Tensor | None]) -> Any:
        """What the callable would have returned."""
        leaves = [c if t is None else t for c, t in zip(self.constants, tensors, strict=True)]
        return pytree.tree_unflatten(leaves, self.structure)


@dataclass
class Block:
    """One callable on its own static tensors.

    call         what runs: a function, or a module's own forward
    module       the module that it is of; None: a plain function
    inputs       static tensors in the places of `structure`, that of (args, kwargs); `constants` are its other leaves
    quantization the autocast that it runs under
    caches       are quantized weights kept over the microbatches of a step?
    """

    call: Callable[..., Any]
    module: torch.nn.Module | None
    structure: pytree.TreeSpec
    inputs: list[Tensor]
    quantization: AutocastState
    caches: bool = False
    training: bool = True
    retain_graph: bool = False
    allow_unused_input: bool = True
    positions: tuple[int, ...] = ()
    constants: tuple[Any, ...] = ()
    outputs: Outputs | None = None
    grad_outputs: list[Tensor | None] = field(default_factory=list)
    parameters: tuple[torch.nn.Parameter, ...] = ()
    _made: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.module is not None:
            self.parameters = tuple(p for p in self.module.parameters() if p.requires_grad)
        self.layers = layers_with_weights(self.module)
        if not self.constants:
            self.positions = tuple(range(len(self.inputs)))
            self.constants = (None,) * len(self.inputs)

    @property
    def surface(self) -> list[Tensor]:
        """What the backward could make gradients of: inputs, then parameters."""
        return [*self.inputs, *self.parameters]

    @property
    def delayed(self) -> list[TransformerEngineBaseModule | GroupedOperation]:
        """The modules that put their weight gradients off."""
        return [
            layer
            for layer in (() if self.module is None else self.module.modules())
            if isinstance(layer, (TransformerEngineBaseModule, GroupedOperation)) and layer.need_backward_dw()
        ]

    def arguments(self, tensors: Sequence[Tensor] | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) of these tensors, by default of the static ones."""
        leaves = list(self.constants)
        for position, tensor in zip(self.positions, self.inputs if tensors is None else tensors, strict=True):
            leaves[position] = tensor
        return pytree.tree_unflatten(leaves, self.structure)

    def forward(self, first: bool | None = False) -> list[Tensor | None]:
        """The leaves of the outputs, which the next `backward` is of.

        first   where weights are cached: has this call to make them?
        """
        state = self.quantization
        args, kwargs = self.arguments()
        if self.caches and first is not None and isinstance(self.module, ProductsModule):
            args, kwargs = called_as(first, self.module, args, kwargs)  # no hook sees its call
        with ExitStack() as blocks:
            blocks.enter_context(torch.set_grad_enabled(self.training))
            blocks.enter_context(flagged(self.caches))
            blocks.enter_context(microbatch(self.module, self.layers, first if self.caches else None))
            blocks.enter_context(
                autocast(state.enabled, state.calibrating, state.recipe, state.group, _graph=True)
            )
            leaves, structure = pytree.tree_flatten(self.call(*args, **kwargs))
        self.outputs = Outputs.of(leaves, structure)
        self._made = leaves if self.training else []
        return [leaf if isinstance(leaf, Tensor) else None for leaf in leaves]

    def prepare_grad_outputs(self) -> None:
        """A static gradient for each output that has one, once the forward has shown which those are."""
        if not self.grad_outputs:
            self.grad_outputs = [
                torch.zeros_like(leaf) if isinstance(leaf, Tensor) and leaf.requires_grad else None
                for leaf in self._made
            ]

    def backward(self) -> list[Tensor | None]:
        """For each tensor of the surface its gradient; None where there is none."""
        assert self.outputs is not None
        made, self._made = self._made, []
        roots = [o for o, has in zip(made, self.outputs.differentiable, strict=True) if has]
        wanted = [tensor for tensor in self.surface if tensor.requires_grad]
        del made
        if not roots or not wanted:
            return [None] * len(self.surface)
        with left_to_caller():
            found = iter(
                torch.autograd.grad(
                    roots,
                    wanted,
                    [grad for grad in self.grad_outputs if grad is not None],
                    allow_unused=True,
                    retain_graph=self.retain_graph,
                )
            )
        grads = [next(found) if tensor.requires_grad else None for tensor in self.surface]
        if not self.allow_unused_input:
            self._check_all_used(grads)
        return grads

    def _check_all_used(self, grads: list[Tensor | None]) -> None:
        for i, (tensor, grad) in enumerate(zip(self.inputs, grads, strict=False)):
            if tensor.requires_grad and grad is None:
                raise RuntimeError(
                    f"input {i} wants a gradient, but no output depends on it; pass it without, or set "
                    "allow_unused_input=True"
                )

    def weight_gradients(self) -> list[Tensor | None]:
        """For each parameter the gradient that was put off; None where it was not, or went to main_grad."""
        before = [parameter.grad for parameter in self.parameters]
        hooks = [(layer, layer._wgrad_hooks) for layer in self.delayed]
        try:
            for parameter in self.parameters:
                parameter.grad = None
            for layer, _ in hooks:
                layer._wgrad_hooks = []  # they belong to a gradient that has arrived, which is at the replay
                type(layer).backward_dw(layer)  # pyright: ignore[reportArgumentType]  # not the instance's door
            return [parameter.grad for parameter in self.parameters]
        finally:
            for parameter, grad in zip(self.parameters, before, strict=True):
                parameter.grad = grad
            for layer, own in hooks:
                layer._wgrad_hooks = own

    def forget(self) -> None:
        """Drop the graph of a forward whose backward will not be asked for."""
        self._made = []
