"""StaticBlock: a callable with static tensors, whose passes a recorder can record.

* forward: outputs = callable(inputs), under the autocast of the capture.
* backward: input and parameter gradients, from static output gradients.
* weight_gradients: the weight gradients that delay_wgrad_compute=True delays.

The passes read and write the same tensors in every call. They have no effect that a replay lacks: the code that replays
also updates the scales.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..functions.scale_update import skip_scale_updates
from ..module.base import TransformerEngineBaseModule
from ..module.linear_base import ProductsModule
from ..ops.basic import GroupedLinear as GroupedOperation
from ..quantization.autocast import AutocastState, autocast
from .caching import flagged, microbatch, with_first_microbatch


@dataclass(frozen=True)
class Outputs:
    """The structure of a return value, its leaves that are not tensors, and which tensors are differentiable.

    Attributes:
        structure: Pytree structure of the return value.
        constants: Leaves that are not tensors.
        differentiable: Whether each tensor leaf is differentiable.
    """

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
        """Rebuild the return value of the callable from the output tensors."""
        leaves = [c if t is None else t for c, t in zip(self.constants, tensors, strict=True)]
        return pytree.tree_unflatten(leaves, self.structure)


@dataclass
class StaticBlock:
    """A callable with static input tensors.

    Attributes:
        call: The function, or the forward of the module.
        module: The module; None for a function.
        structure: Argument structure (args, kwargs).
        inputs: Static tensors at `positions` among the leaves of `structure`.
        constants: The other leaves.
        quantization: Autocast state of the capture.
        caches: Whether the microbatches of a step reuse quantized weights.
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
        modules = () if self.module is None else self.module.modules()
        self.layers = [layer for layer in modules if isinstance(layer, ProductsModule)]
        if not self.constants:
            self.positions = tuple(range(len(self.inputs)))
            self.constants = (None,) * len(self.inputs)

    @property
    def surface(self) -> list[Tensor]:
        """The tensors that may receive gradients: inputs, then parameters."""
        return [*self.inputs, *self.parameters]

    @property
    def delayed(self) -> list[TransformerEngineBaseModule | GroupedOperation]:
        """The modules that delay their weight gradients."""
        return [
            layer
            for layer in (() if self.module is None else self.module.modules())
            if isinstance(layer, (TransformerEngineBaseModule, GroupedOperation))
            and layer.need_backward_dw()
        ]

    def arguments(
        self, tensors: Sequence[Tensor] | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return (args, kwargs) with the given tensors, by default the static inputs."""
        leaves = list(self.constants)
        for position, tensor in zip(
            self.positions, self.inputs if tensors is None else tensors, strict=True
        ):
            leaves[position] = tensor
        return pytree.tree_unflatten(leaves, self.structure)

    def forward(self, first: bool | None = False) -> list[Tensor | None]:
        """Run the callable and return the leaves of its outputs.

        Args:
            first: With cached weights, whether this call quantizes them.
        """
        state = self.quantization
        args, kwargs = self.arguments()
        if self.caches and first is not None and isinstance(self.module, ProductsModule):
            # no hook sees its call
            args, kwargs = with_first_microbatch(first, self.module, args, kwargs)
        with ExitStack() as blocks:
            blocks.enter_context(torch.set_grad_enabled(self.training))
            blocks.enter_context(flagged(self.caches))
            blocks.enter_context(
                microbatch(self.module, self.layers, first if self.caches else None)
            )
            blocks.enter_context(
                autocast(state.enabled, state.calibrating, state.recipe, state.group, _graph=True)
            )
            leaves, structure = pytree.tree_flatten(self.call(*args, **kwargs))
        self.outputs = Outputs.of(leaves, structure)
        self._made = leaves if self.training else []
        return [leaf if isinstance(leaf, Tensor) else None for leaf in leaves]

    def prepare_grad_outputs(self) -> None:
        """Allocate a static gradient for each differentiable forward output."""
        if not self.grad_outputs:
            self.grad_outputs = [
                torch.zeros_like(leaf) if isinstance(leaf, Tensor) and leaf.requires_grad else None
                for leaf in self._made
            ]

    def backward(self) -> list[Tensor | None]:
        """Return the gradient for each surface tensor, or None."""
        assert self.outputs is not None
        outputs, self._made = self._made, []
        roots = [o for o, has in zip(outputs, self.outputs.differentiable, strict=True) if has]
        inputs = [tensor for tensor in self.surface if tensor.requires_grad]
        del outputs
        if not roots or not inputs:
            return [None] * len(self.surface)
        with skip_scale_updates():
            gradients = iter(
                torch.autograd.grad(
                    roots,
                    inputs,
                    [grad for grad in self.grad_outputs if grad is not None],
                    allow_unused=True,
                    retain_graph=self.retain_graph,
                )
            )
        grads = [next(gradients) if tensor.requires_grad else None for tensor in self.surface]
        if not self.allow_unused_input:
            for i, (tensor, grad) in enumerate(zip(self.inputs, grads, strict=False)):
                if tensor.requires_grad and grad is None:
                    raise RuntimeError(
                        f"input {i} wants a gradient, but no output depends on it; pass it without, or set "
                        "allow_unused_input=True"
                    )
        return grads

    def weight_gradients(self) -> list[Tensor | None]:
        """Return each parameter's delayed gradient; None if it was not delayed, or was accumulated into main_grad."""
        before = [parameter.grad for parameter in self.parameters]
        hooks = [(layer, layer._wgrad_hooks) for layer in self.delayed]
        try:
            for parameter in self.parameters:
                parameter.grad = None
            for layer, _ in hooks:
                layer._wgrad_hooks = []  # they run at the replay, when the gradient exists
                type(layer).backward_dw(layer)  # pyright: ignore[reportArgumentType]  # the method of the class: `backward_dw` of a graphed module is replaced
            return [parameter.grad for parameter in self.parameters]
        finally:
            for parameter, grad in zip(self.parameters, before, strict=True):
                parameter.grad = grad
            for layer, saved_hooks in hooks:
                layer._wgrad_hooks = saved_hooks

    def forget(self) -> None:
        """Drop the autograd graph of a forward pass without a backward pass."""
        self._made = []
