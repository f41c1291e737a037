"""Operators for grouped linear layers whose row counts are a tensor, for torch.compile.

A graph knows the total row count but not each group's, and formats, padding and products depend on
it. The forward and the backward pass in such a call are therefore one operator each, which runs the
eager-mode steps with the numbers that the tensor holds. The results are bit-equal to eager mode.

Code shapes depend on the groups, so a graph saves the unquantized input and the weights. The
backward operator repeats their casts, with the forward-pass scales under delayed scaling.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..quantization.scale_snapshot import compiled_scale
from ..runtime.autograd import Function
from ..runtime.double_backward import once_differentiable
from ..tensor.float8_tensor import Float8Quantizer
from ..tensor.quantizer import Calibrating, Quantizer
from .grouped_call import GroupedCall, GroupedQuantizers, GroupedSpec
from .linear_spec import LinearSpec, replace_fields
from .scale_update import ScaleUpdate


@dataclass(frozen=True, eq=False)
class GroupedKernel:
    """Passes for a call kind, as the operators run them.

    Attributes:
        spec: The settings.
        inference: Function (call, inputs) -> y.
        again: Function (call, inputs) -> saved values for the backward pass, without y.
        backward: Function (call, [dy, *the results of `again`]) -> a gradient per input or None.
        present: Of each input, whether `backward` returns its gradient.
        call: Function from a spec, the row counts, x and its weights to the call.
        states: Delayed-scaling states for the forward and the backward pass.
    """

    spec: GroupedSpec
    inference: Callable[[GroupedCall, Sequence[Tensor]], Tensor]
    again: Callable[[GroupedCall, Sequence[Tensor]], list[Any]]
    backward: Callable[[GroupedCall, list[Any]], Sequence[Any]]
    present: tuple[bool, ...]
    call: Callable[[GroupedSpec, Tensor, Tensor, Sequence[Tensor]], GroupedCall]
    states: tuple[tuple[Any, ...], tuple[Any, ...]]


class _ForwardState(NamedTuple):
    """A delayed-scaling state in an operator: the scales [n] in a graph, and a zero history [1, n]."""

    scale: Tensor
    scale_in_place: Tensor
    amax_history: Tensor


# Kernels by the keys that graphs hold, and the owners that keep them alive.
_kernels: weakref.WeakValueDictionary[str, GroupedKernel] = weakref.WeakValueDictionary()
_held: weakref.WeakKeyDictionary[Any, list[GroupedKernel]] = weakref.WeakKeyDictionary()
_serial = itertools.count()


def register(owner: Any, kernel: GroupedKernel) -> str:
    """Return the key by which graphs find a kernel while its owner, a layer, is alive; it ends in `present`.

    Raises:
        NotImplementedError: The call has effects that its operators cannot have.
    """
    name = type(owner).__name__
    for what, found in (
        (
            "delayed weight gradients",
            any(g.weight_gradient.store is not None for g in kernel.spec.groups),
        ),
        (
            "gradients accumulated into main_grad",
            any(g.weight_gradient.fused for g in kernel.spec.groups),
        ),
        ("inspected results", any(g.inspector is not None for g in kernel.spec.groups)),
        ("quantizers that cannot quantize twice", not all(map(_repeats, _quantizers(kernel.spec)))),
    ):
        if found:
            raise NotImplementedError(
                f"{name}: {what} in a compiled graph with numbers of rows in a tensor need eager mode; give the "
                "module te.GroupedLinear a list of numbers, or leave the layer out of the graph"
            )
    key = (
        f"{name} {next(_serial)}:{''.join(['1' if present else '0' for present in kernel.present])}"
    )
    _kernels[key] = kernel
    _held.setdefault(owner, []).append(kernel)
    return key


def gradients_of_key(key: str) -> tuple[bool, ...]:
    """Return `GroupedKernel.present` for a key, which a compiler treats as a constant."""
    return tuple([present == "1" for present in key.rpartition(":")[2]])


def _quantizers(spec: GroupedSpec) -> list[Quantizer]:
    """Return the input and weight quantizers."""
    return [
        quantizer
        for group in spec.groups
        for quantizer in (group.input_quantizer, group.weight_quantizer)
    ]


def _repeats(quantizer: Quantizer) -> bool:
    """Return whether a backward operator can repeat a forward-pass cast."""
    if isinstance(quantizer, Calibrating):
        return _repeats(quantizer.quantizer)
    return not quantizer.stochastic_rounding and (
        not quantizer.stateful or type(quantizer) is Float8Quantizer
    )


def _with_states(
    kernel: GroupedKernel, forward: Sequence[Tensor], backward: Sequence[Tensor]
) -> tuple[GroupedSpec, list[Tensor]]:
    """Return the spec with quantizers that read these scales, and the maxima [n] that they record for each state.

    Args:
        kernel: The kernel.
        forward: Scales in the forward-pass states.
        backward: Scales in the backward-pass states; empty in the forward pass.
    """
    found: dict[int, _ForwardState] = {}
    for states, scales in zip(kernel.states, (forward, backward), strict=True):
        for state, scale in zip(states, scales, strict=False):
            found[id(state)] = _ForwardState(scale, scale, scale.new_zeros(1, scale.shape[0]))
    maxima = [state.amax_history[0] for state in found.values()]
    if not found:
        return kernel.spec, maxima

    def of(quantizer: Quantizer) -> Quantizer:
        if isinstance(quantizer, Calibrating):
            return Calibrating(of(quantizer.quantizer))
        state = found.get(id(getattr(quantizer, "_state", None)))
        if state is None:
            return quantizer
        copied: Any = copy.copy(quantizer)
        copied._state, copied._slot = state, None
        return copied

    groups: list[LinearSpec] = [
        replace_fields(
            g,
            input_quantizer=of(g.input_quantizer),
            weight_quantizer=of(g.weight_quantizer),
            grad_output_quantizer=of(g.grad_output_quantizer),
        )
        for g in kernel.spec.groups
    ]
    merged = kernel.spec.quantizers
    if merged.input is not None:
        merged = GroupedQuantizers.merged(
            [g.input_quantizer for g in groups],
            [g.weight_quantizer for g in groups],
            [g.grad_output_quantizer for g in groups],
        )
    return replace(kernel.spec, groups=tuple(groups), quantizers=merged), maxima


@torch.library.custom_op("transformer_engine::grouped_linear_forward", mutates_args=())
def _forward_op(
    x: torch.Tensor,
    rows: torch.Tensor,
    tensors: list[torch.Tensor],
    scales: list[torch.Tensor],
    key: str,
) -> list[torch.Tensor]:
    """Return y, and the maxima that the casts record for each state."""
    kernel = _kernels[key]
    spec, maxima = _with_states(kernel, scales, ())
    call = kernel.call(spec, rows, x, tensors)
    y = kernel.inference(call, (x, *tensors))
    return [y, *maxima]


@_forward_op.register_fake
def _forward_fake(x, rows, tensors, scales, key):
    spec = _kernels[key].spec
    y = x.new_empty((*x.shape[:-1], spec.extents[0]), dtype=spec.groups[0].dtype)
    return [y, *[torch.empty_like(scale) for scale in scales]]


@torch.library.custom_op("transformer_engine::grouped_linear_backward", mutates_args=())
def _backward_op(
    dy: torch.Tensor,
    x: torch.Tensor,
    rows: torch.Tensor,
    tensors: list[torch.Tensor],
    forward_scales: list[torch.Tensor],
    scales: list[torch.Tensor],
    key: str,
) -> list[torch.Tensor]:
    """Return gradients for the inputs that have one, and the maxima that gradient casts record."""
    kernel = _kernels[key]
    spec, maxima = _with_states(kernel, forward_scales, scales)
    call = kernel.call(spec, rows, x, tensors)
    inputs = (x, *tensors)
    made: list[Tensor] = []
    results = kernel.backward(call, [dy, *kernel.again(call, inputs)])
    for gradient, tensor in zip(results, inputs, strict=True):
        if gradient is not None:
            gradient = gradient.to(tensor.dtype).reshape(tensor.shape)
            # Operator results share no memory.
            owns_storage = (
                gradient.untyped_storage().nbytes() == gradient.numel() * gradient.element_size()
            )
            made.append(gradient if owns_storage and gradient.is_contiguous() else gradient.clone())
    # The forward pass recorded the maxima for the casts that are repeated here.
    return [*made, *maxima[len(forward_scales) :]]


@_backward_op.register_fake
def _backward_fake(dy, x, rows, tensors, forward_scales, scales, key):
    pairs = zip(_kernels[key].present, (x, *tensors), strict=True)
    likes = [tensor for present, tensor in pairs if present] + scales
    return [torch.empty(like.shape, dtype=like.dtype, device=like.device) for like in likes]


def _record(states: Sequence[Any], maxima: Sequence[Tensor]) -> None:
    for state, amax in zip(states, maxima, strict=True):
        # The history is written through its base tensor, so that a compiler sees the write.
        state.amax_history[0].copy_(torch.maximum(state.amax_history[0], amax))


def forward_in_graph(
    key: str, x: Tensor, rows: Tensor, tensors: Sequence[Tensor], states: Sequence[Any]
) -> tuple[Tensor, list[Tensor]]:
    """Return y for a traced call, and copies of the scales that its casts use.

    Args:
        key: Kernel key, from `register`.
        x: The input.
        rows: Rows per group.
        tensors: Its other inputs.
        states: Forward delayed-scaling states.
    """
    scales = [compiled_scale(state) for state in states]
    y, *maxima = _forward_op(x, rows, list(tensors), scales, key)
    _record(states, maxima)
    return y, scales


def backward_in_graph(
    key: str,
    saved: tuple[Tensor, Tensor, Tensor, Sequence[Tensor]],
    scales: Sequence[Tensor],
    states: Sequence[Any],
) -> list[Tensor | None]:
    """Return the gradient per input of a traced call; None for an input that needs none.

    Args:
        key: Kernel key.
        saved: dy, x, the rows per group, and the other inputs.
        scales: Forward-pass scales.
        states: Backward delayed-scaling states.
    """
    dy, x, rows, tensors = saved
    present = gradients_of_key(key)
    if not any(present):
        return [None] * len(present)
    local_scales = [compiled_scale(state) for state in states]
    results = _backward_op(dy.contiguous(), x, rows, list(tensors), list(scales), local_scales, key)
    _record(states, results[sum(present) :])
    gradients: list[Tensor | None] = []
    at = 0
    for is_present in present:
        gradients.append(results[at] if is_present else None)
        at += int(is_present)
    return gradients


class TracedGroups(Function):
    """One traced call as an autograd function: apply(x, rows, key, states, update, *tensors)."""

    @staticmethod
    def forward(ctx: Any, x, rows, key, states, update, *tensors):
        y, scales = forward_in_graph(key, x, rows, tensors, states[0])
        ctx.save_for_backward(x, rows, *tensors, *scales)
        ctx.key, ctx.states, ctx.count, ctx.scale_update = key, states[1], len(tensors), update
        return y

    @staticmethod
    @once_differentiable("GroupedLinear")
    def backward(ctx: Any, grad_output):
        x, rows, *rest = ctx.saved_tensors
        saved = grad_output, x, rows, rest[: ctx.count]
        dx, *grads = backward_in_graph(ctx.key, saved, rest[ctx.count :], ctx.states)
        update: ScaleUpdate | None = ctx.scale_update
        if update is not None:
            update.run()
        return dx, None, None, None, None, *grads
