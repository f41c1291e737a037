"""outputs = Replayed(block, ..)(*args): the recordings of a block's passes in place of the passes."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...common.checks import described
from ..functions.scale_update import of_the_pass
from ..module.base import TransformerEngineBaseModule
from ..ops.recipe_slots import RecipeSlots
from ..quantization import FP8GlobalStateManager, delayed_scaling
from ..runtime.capture import Recording
from ..runtime.double_backward import once_differentiable
from ..runtime.warn_once import warn_once
from .arguments import Sample
from .block import Block
from .kept import delayed_states_of


class _Ticket:
    """Held by the graph node of one forward: while it lives and is not used, a backward may come."""

    used = False


class Replayed:
    """A block that has been recorded.

    forward, backward, weight_gradients   its recordings; None for a pass that it has not
    clones_gradients   do parameters get gradients of their own, that a later replay leaves alone?
    clones_outputs     are outputs, and gradients of inputs, the caller's own too?
    """

    def __init__(self, block: Block, clones_gradients: bool = True, clones_outputs: bool = False):
        self.block = block
        self.clones_gradients = clones_gradients
        self.clones_outputs = clones_outputs
        self._ticket: weakref.ref[_Ticket] | None = None
        self.forward: Recording | None = None
        self.backward: Recording | None = None
        self.weight_gradients: Recording | None = None
        self.number = 0
        self.first: bool | None = None
        self._leaf_inputs = [tensor.requires_grad for tensor in block.inputs]
        self._states: object = None
        self._updates_scales = False
        modules = () if block.module is None else block.module.modules()
        self._quantized = [m for m in modules if isinstance(m, (TransformerEngineBaseModule, RecipeSlots))]
        self._announcing = [p for p in block.parameters if hasattr(p, "grad_added_to_main_grad")]

    # What records.

    def expect_nothing(self) -> None:
        """Before warming up: whatever a parameter says of main_grad after it, warming up has shown."""
        for parameter in self._announcing:
            parameter.grad_added_to_main_grad = False  # pyright: ignore[reportAttributeAccessIssue]

    def note_what_showed(self) -> None:
        """What a backward does in Python, as warming up has shown: update scales, say that main_grad has a gradient."""
        self._updates_scales = any(delayed_states_of(layer, "scaling_bwd") for layer in self._quantized)
        self._announcing = [p for p in self._announcing if p.grad_added_to_main_grad]  # pyright: ignore

    # What runs at a call.

    def run(
        self, tensors: Sequence[Tensor], first: bool | None = None, stream: Any = None, event: Any = None
    ) -> Any:
        """What the callable returns for input tensors of the recorded shapes."""
        if self.forward is None:
            raise RuntimeError("this graph has been reset; capture the callable again")
        self._register_scales()
        outputs = _Replay.apply(self, first, stream, event, *tensors, *self.block.parameters)
        assert self.block.outputs is not None
        return self.block.outputs.of_tensors(outputs)  # pyright: ignore[reportArgumentType]

    def _register_scales(self) -> None:
        """Let the updates of delayed scaling include the block's, also after the global state was reset."""
        if self._states is delayed_scaling.pools():
            return
        for layer in self._quantized:
            if isinstance(layer, RecipeSlots):
                layer.register_for_updates()
            else:
                FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(layer.fp8_meta)
        self._states = delayed_scaling.pools()

    def replay_forward(self, tensors: Sequence[Tensor], stream: Any, event: Any) -> list[Tensor | None]:
        assert self.forward is not None
        for static, given in zip(self.block.inputs, tensors, strict=True):
            if static.data_ptr() != given.data_ptr():
                static.copy_(given)  # in a node's forward, where gradients are off
        self.forward.replay(stream, event)
        self.number += 1
        if self.clones_outputs:
            return [None if result is None else result.clone() for result in self.forward.results]
        return [None if result is None else result.detach() for result in self.forward.results]

    def ticket(self) -> _Ticket:
        """For the node of a forward that has just run, which holds it as long as a backward may come."""
        ticket = _Ticket()
        self._ticket = weakref.ref(ticket)
        return ticket

    @property
    def waits(self) -> bool:
        """May the backward of the last forward still come?"""
        ticket = None if self._ticket is None else self._ticket()
        return ticket is not None and not ticket.used

    def replay_backward(
        self, number: int, grads: Sequence[Tensor | None], stream: Any, event: Any
    ) -> list[Any]:
        """Gradients of the inputs and parameters, of those of the outputs."""
        if self.backward is None:
            raise RuntimeError("this graph has been reset, or has no backward; capture it in training mode")
        if number != self.number:
            raise RuntimeError(
                "the graph's forward has been replayed since, over what this backward would read; run each backward "
                "before the next forward of the same graphed callable, or capture one callable a microbatch"
            )
        for static, given in zip(self.block.grad_outputs, grads, strict=True):
            if static is not None:
                if given is None:
                    static.zero_()
                elif static.data_ptr() != given.data_ptr():
                    static.copy_(given)
        if self.first:
            self._clear_main_gradients()
        self.backward.replay(stream, event)
        for parameter in self._announcing:
            parameter.grad_added_to_main_grad = True  # pyright: ignore[reportAttributeAccessIssue]
        if self._updates_scales:
            of_the_pass().run()
        return self._own(self.backward.results)

    def _clear_main_gradients(self) -> None:
        """Sums of weight gradients begin anew with the first microbatch of a step, as without a graph."""
        for layer in self.block.layers:
            if layer.fuse_wgrad_accumulation:
                for name in (name for names in layer._config._weights for name in names):
                    main_grad = getattr(getattr(layer, name), "main_grad", None)
                    if isinstance(main_grad, Tensor):
                        main_grad.zero_()

    def _own(self, results: Sequence[Tensor | None]) -> list[Tensor | None]:
        count = len(self.block.inputs)
        owned: list[Tensor | None] = []
        for i, grad in enumerate(results):
            if grad is None:
                owned.append(None)
            elif i < count:
                owned.append(grad.clone() if self._leaf_inputs[i] or self.clones_outputs else grad.detach())
            else:
                late = getattr(self.block.parameters[i - count], "skip_backward_post_hook", False)
                owned.append(grad.clone() if self.clones_gradients and not late else grad.detach())
        return owned

    def backward_dw(self) -> None:
        """The weight gradients that the last backward put off, added to the parameters' .grad."""
        if self.weight_gradients is None:
            return
        self.weight_gradients.replay()
        for parameter, grad in zip(self.block.parameters, self.weight_gradients.results, strict=True):
            if grad is not None:
                parameter.grad = grad.clone() if parameter.grad is None else parameter.grad + grad
        for layer in self.block.delayed:
            layer._trigger_wgrad_accumulation_and_reduce_hooks()

    def reset(self) -> None:
        """Free the graphs; a later call raises."""
        for recording in (self.forward, self.backward, self.weight_gradients):
            if recording is not None:
                recording.reset()
        self.forward = self.backward = self.weight_gradients = None


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, graph: Replayed, first: bool | None, stream: Any, event: Any, *surface: Tensor
    ) -> Any:
        count = len(graph.block.inputs)
        graph._leaf_inputs = [tensor.requires_grad and tensor.is_leaf for tensor in surface[:count]]
        outputs = graph.replay_forward(surface[:count], stream, event)
        graph.first = first
        ctx.ticket = graph.ticket()
        ctx.graph, ctx.number, ctx.stream, ctx.event = graph, graph.number, stream, event
        ctx.set_materialize_grads(False)
        assert graph.block.outputs is not None
        constant = [
            output
            for output, has in zip(outputs, graph.block.outputs.differentiable, strict=True)
            if output is not None and not has
        ]
        ctx.mark_non_differentiable(*constant)
        return tuple(outputs)

    @staticmethod
    @once_differentiable("a graphed callable")
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        ctx.ticket.used = True
        found = ctx.graph.replay_backward(ctx.number, grads, ctx.stream, ctx.event)
        return (None, None, None, None, *found)


class Arguments:
    """Takes the tensors of a call out of its arguments and checks them against the captured ones.

    Args:
        sample: The captured arguments.
        statics: The captured tensors.
    """

    def __init__(self, sample: Sample, statics: Sequence[Tensor]):
        self.structure = sample.leaves.structure
        self.names = sample.names
        self.count = sample.args
        self.facts = [(tensor.shape, tensor.dtype, tensor.device) for tensor in statics]
        self.is_flat = not sample.names and len(statics) == sample.args
        self.positions = sample.leaves.positions
        constants = enumerate(sample.leaves.constants)
        self.constants = [(i, value) for i, value in constants if i not in self.positions]

    def tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Tensor]:
        """Return the tensors of a call, in the dtype and on the device of the captured ones.

        Raises:
            TypeError, ValueError: An argument's structure, shape or dtype differs from the capture.
        """
        for name in self.names:
            if name not in kwargs:
                raise TypeError(f"keyword {name} was captured and is missing; pass it in every call")
        if len(args) != self.count:
            raise TypeError(f"{len(args)} positional arguments; {self.count} were captured")
        if self.is_flat:
            leaves: Sequence[Any] = args
        else:
            leaves, structure = pytree.tree_flatten((args, {name: kwargs[name] for name in self.names}))
            if structure != self.structure:
                raise TypeError("the arguments are nested otherwise than the captured ones; pass them alike")
            if self.constants:
                leaves = self._without_constants(leaves)
        for i, (leaf, facts) in enumerate(zip(leaves, self.facts, strict=True)):
            if not isinstance(leaf, Tensor):
                raise TypeError(f"argument {i} is a {type(leaf).__name__}; a tensor was captured")
            if (leaf.shape, leaf.dtype, leaf.device) != facts:
                leaves = list(leaves)
                leaves[i] = _as_captured(i, leaf, *facts)
        return leaves

    def _without_constants(self, leaves: Sequence[Any]) -> list[Any]:
        """The tensors among the leaves; ValueError where another leaf is not the one that the graph has kept."""
        for i, kept in self.constants:
            if type(leaves[i]) is not type(kept) or leaves[i] != kept:
                raise ValueError(
                    f"a keyword's {described(leaves[i])} was captured as {described(kept)}, which the graph keeps; "
                    "capture one for each value"
                )
        return [leaves[i] for i in self.positions]


def _as_captured(
    place: int, tensor: Tensor, shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Copy an argument to the captured dtype and device, differentiably.

    Raises:
        ValueError: The argument has another shape, or a dtype that cannot be converted.
    """
    if tensor.shape != shape:
        raise ValueError(
            f"argument {place} is {list(tensor.shape)} {tensor.dtype} on {tensor.device}; the graph was captured for "
            f"{list(shape)} {dtype} on {device}. Capture one for each shape"
        )
    if not torch.can_cast(tensor.dtype, dtype):
        raise ValueError(
            f"argument {place} is {tensor.dtype}; the graph was captured for {dtype}: convert it to {dtype}"
        )
    if tensor.dtype != dtype:
        warn_once(
            "argument of a graphed callable in another dtype",
            f"argument {place} is {tensor.dtype}, the graph was captured for {dtype}: it is converted; pass {dtype}",
        )
    return tensor.to(device, dtype)
