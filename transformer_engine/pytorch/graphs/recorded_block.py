"""RecordedBlock: the recorded forward and backward pass of a callable, and their replay under autograd."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..functions.scale_update import update_at_end_of_pass
from ..functions.weight_gradient import restart_sums
from ..module.base import TransformerEngineBaseModule
from ..ops.recipe_slots import RecipeSlots
from ..quantization import FP8GlobalStateManager, delayed_scaling
from ..runtime.autograd import Function
from ..runtime.capture import Recording
from ..runtime.double_backward import once_differentiable
from .saved_state import find_delayed_states
from .static_block import StaticBlock


class _Ticket:
    """Held by the autograd node of one forward pass; while it is alive and unused, a backward pass may follow."""

    used = False


class RecordedBlock:
    """A block whose passes are recorded.

    Attributes:
        forward: Recording of the forward pass.
        backward: Recording of the backward pass, or None.
        weight_gradients: Recording of the delayed weight gradients, or None.
        clones_gradients: Copy parameter gradients, so that later replays do not overwrite them.
        clones_outputs: Also copy outputs and input gradients.
    """

    def __init__(
        self, block: StaticBlock, clones_gradients: bool = True, clones_outputs: bool = False
    ):
        self.block = block
        self.clones_gradients = clones_gradients
        self.clones_outputs = clones_outputs
        self._ticket: weakref.ref[_Ticket] | None = None
        self.forward: Recording | None = None
        self.backward: Recording | None = None
        self.weight_gradients: Recording | None = None
        self.number = 0
        self._leaf_inputs = [tensor.requires_grad for tensor in block.inputs]
        self._states: object = None
        self._updates_scales = False
        modules = () if block.module is None else block.module.modules()
        self._quantized = [
            m for m in modules if isinstance(m, (TransformerEngineBaseModule, RecipeSlots))
        ]
        self._announcing = [p for p in block.parameters if hasattr(p, "grad_added_to_main_grad")]

    def clear_announcements(self) -> None:
        """Clear `grad_added_to_main_grad` of the parameters before the warm-up sets it."""
        for parameter in self._announcing:
            parameter.grad_added_to_main_grad = False  # pyright: ignore[reportAttributeAccessIssue]

    def note_side_effects(self) -> None:
        """Note which backward-pass Python side effects the warm-up had: scale updates, main_grad flags."""
        self._updates_scales = any(
            find_delayed_states(layer, "scaling_bwd") for layer in self._quantized
        )
        self._announcing = [p for p in self._announcing if p.grad_added_to_main_grad]  # pyright: ignore

    def run(
        self,
        tensors: Sequence[Tensor],
        first: bool | None = None,
        stream: Any = None,
        event: Any = None,
    ) -> Any:
        """Compute the callable for input tensors with the recorded shapes."""
        if self.forward is None:
            raise RuntimeError("this graph has been reset; capture the callable again")
        # Register the block's delayed-scaling states for updates, also after a global state reset.
        if self._states is not delayed_scaling.registry.pools:
            for layer in self._quantized:
                if isinstance(layer, RecipeSlots):
                    layer.register_for_updates()
                else:
                    FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(layer.fp8_meta)
            self._states = delayed_scaling.registry.pools
        if first and self.backward is not None:
            for layer in self.block.layers:
                layer.begin_first_microbatch()
        outputs = _GraphReplay.apply(self, stream, event, *tensors, *self.block.parameters)
        assert self.block.outputs is not None
        return self.block.outputs.of_tensors(outputs)

    def ticket(self) -> _Ticket:
        """Return the ticket of the last forward pass, which its autograd node holds."""
        ticket = _Ticket()
        self._ticket = weakref.ref(ticket)
        return ticket

    @property
    def waits(self) -> bool:
        """Whether the backward pass of the last forward pass may still follow."""
        ticket = None if self._ticket is None else self._ticket()
        return ticket is not None and not ticket.used

    def replay_backward(
        self, number: int, grads: Sequence[Tensor | None], stream: Any, event: Any
    ) -> list[Any]:
        """Return the input and parameter gradients from the output gradients."""
        if self.backward is None:
            raise RuntimeError(
                "this graph has been reset, or has no backward; capture it in training mode"
            )
        if number != self.number:
            raise RuntimeError(
                "the graph's forward has been replayed since, over what this backward would read; run each backward "
                "before the next forward of the same graphed callable, or capture one callable a microbatch"
            )
        for static, value in zip(self.block.grad_outputs, grads, strict=True):
            if static is not None:
                if value is None:
                    static.zero_()
                elif static.data_ptr() != value.data_ptr():
                    static.copy_(value)
        # As without a graph, weight gradient sums restart with the first gradient of a step.
        restart_sums(
            p
            for layer in self.block.layers
            if layer.fuse_wgrad_accumulation
            for p in layer.parameters()
        )
        self.backward.replay(stream, event)
        for parameter in self._announcing:
            parameter.grad_added_to_main_grad = True  # pyright: ignore[reportAttributeAccessIssue]
        if self._updates_scales:
            update_at_end_of_pass().run()
        return self._own(self.backward.results)

    def _own(self, results: Sequence[Tensor | None]) -> list[Tensor | None]:
        count = len(self.block.inputs)
        owned: list[Tensor | None] = []
        for i, grad in enumerate(results):
            if grad is None:
                owned.append(None)
            elif i < count:
                owned.append(
                    grad.clone() if self._leaf_inputs[i] or self.clones_outputs else grad.detach()
                )
            else:
                skips_hook = getattr(
                    self.block.parameters[i - count], "skip_backward_post_hook", False
                )
                owned.append(
                    grad.clone() if self.clones_gradients and not skips_hook else grad.detach()
                )
        return owned

    def backward_dw(self) -> None:
        """Compute the weight gradients that the last backward pass postponed and add them to `.grad`."""
        if self.weight_gradients is None:
            return
        self.weight_gradients.replay()
        for parameter, grad in zip(
            self.block.parameters, self.weight_gradients.results, strict=True
        ):
            if grad is not None:
                parameter.grad = grad.clone() if parameter.grad is None else parameter.grad + grad
        for layer in self.block.delayed:
            layer._trigger_wgrad_accumulation_and_reduce_hooks()

    def reset(self) -> None:
        """Free the graphs; a later call raises RuntimeError."""
        for recording in (self.forward, self.backward, self.weight_gradients):
            if recording is not None:
                recording.reset()
        self.forward = self.backward = self.weight_gradients = None


class _GraphReplay(Function):
    @staticmethod
    def forward(ctx: Any, graph: RecordedBlock, stream: Any, event: Any, *surface: Tensor) -> Any:
        count = len(graph.block.inputs)
        graph._leaf_inputs = [tensor.requires_grad and tensor.is_leaf for tensor in surface[:count]]
        assert graph.forward is not None
        for static, value in zip(graph.block.inputs, surface[:count], strict=True):
            if static.data_ptr() != value.data_ptr():
                static.copy_(value)  # in a node's forward, where gradients are off
        graph.forward.replay(stream, event)
        graph.number += 1
        if graph.clones_outputs:
            outputs = [
                None if result is None else result.clone() for result in graph.forward.results
            ]
        else:
            outputs = [
                None if result is None else result.detach() for result in graph.forward.results
            ]
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
        input_grads = ctx.graph.replay_backward(ctx.number, grads, ctx.stream, ctx.event)
        return (None, None, None, *input_grads)
