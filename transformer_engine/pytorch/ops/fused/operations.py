"""The fused operations and the functions that insert them, greedily from left to right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ....common.recipe import Recipe
from ...distributed.collectives import world_size
from ..basic import (
    GELU,
    AddExtraInput,
    BasicLinear,
    Bias,
    ConstantScale,
    MakeExtraOutput,
    ReduceScatter,
    ReLU,
    RMSNorm,
)
from ..fuser import register_backward_fusion, register_forward_fusion
from ..operation import BasicOperation, FusibleOperation
from ..step_operation import StepFusedOperation

Ops = list[FusibleOperation]


def _given(*ops: BasicOperation | None) -> list[BasicOperation]:
    return [op for op in ops if op is not None]


class ForwardLinearBiasActivation(StepFusedOperation):
    """A product with its bias in the epilogue.

    Args:
        linear: The product.
        bias: The bias.
        activation: Must be None; activations are operations of their own.
    """

    def __init__(
        self, *, linear: BasicLinear, bias: Bias | None, activation: BasicOperation | None = None
    ) -> None:
        super().__init__(_given(linear, bias, activation))
        self._has_activation = activation is not None

    def pre_fuser_forward(self, *, requires_grad: bool) -> None:
        if self._has_activation:
            raise NotImplementedError(
                "activation is unsupported; give activation=None and put the activation behind the fused operation"
            )
        super().pre_fuser_forward(requires_grad=requires_grad)


class ForwardLinearBiasAdd(StepFusedOperation):
    """A product and a bias, accumulated into an extra input.

    Args:
        linear: The product.
        bias: The bias, or None.
        add: The in-place addition.
    """

    def __init__(self, *, linear: BasicLinear, bias: Bias | None, add: AddExtraInput) -> None:
        super().__init__(_given(linear, bias, add))


class ForwardLinearScaleAdd(StepFusedOperation):
    """A scaled product, accumulated into an extra input.

    Args:
        linear: The product.
        scale: The scaling.
        add: The in-place addition.
    """

    def __init__(self, *, linear: BasicLinear, scale: ConstantScale, add: AddExtraInput) -> None:
        super().__init__([linear, scale, add])


class BackwardLinearAdd(StepFusedOperation):
    """An input gradient, accumulated into the gradient of an extra output.

    Args:
        backward_add: The extra output.
        linear: The product.
    """

    def __init__(self, *, backward_add: MakeExtraOutput, linear: BasicLinear) -> None:
        super().__init__([backward_add, linear])


class BackwardLinearScale(StepFusedOperation):
    """The gradients of a scaled product.

    Args:
        scale: The scaling.
        linear: The product.
    """

    def __init__(self, *, scale: ConstantScale, linear: BasicLinear) -> None:
        super().__init__([linear, scale])


class BackwardActivationBias(StepFusedOperation):
    """The gradients of a bias and an activation, quantized for the operation before.

    Args:
        bias: The bias.
        activation: The activation.
    """

    def __init__(self, *, bias: Bias, activation: BasicOperation) -> None:
        super().__init__([bias, activation])


class BackwardAddRMSNorm(StepFusedOperation):
    """The gradient of an RMSNorm and the gradient of an extra output, added.

    Args:
        add: The extra output.
        rmsnorm: The norm.
    """

    def __init__(self, *, add: MakeExtraOutput, rmsnorm: RMSNorm) -> None:
        super().__init__([add, rmsnorm])


class UserbuffersForwardLinear(StepFusedOperation):
    """A product, a bias and a reduce-scatter of a tensor-parallel layer.

    Args:
        linear: The product.
        bias: The bias, or None.
        reduce_scatter: The reduction, or None.
    """

    def __init__(
        self, *, linear: BasicLinear, bias: Bias | None = None, reduce_scatter: ReduceScatter | None = None
    ) -> None:
        super().__init__(_given(linear, bias, reduce_scatter))


class UserbuffersBackwardLinear(UserbuffersForwardLinear):
    """The backward pass of `UserbuffersForwardLinear`."""


def _replaced(ops: Ops, match: Callable[[Ops], StepFusedOperation | None]) -> Ops:
    """Replace the operations that `match` recognizes at the beginning of a list, greedily from left to right."""
    made: Ops = []
    at = 0
    while at < len(ops):
        fused = match(ops[at : at + 4])
        made.append(ops[at] if fused is None else fused)
        at += 1 if fused is None else len(fused.basic_ops)
    return made


def _are(ops: Sequence[FusibleOperation], *kinds: type | tuple[type, ...]) -> bool:
    return len(ops) >= len(kinds) and all(isinstance(op, kind) for op, kind in zip(ops, kinds, strict=False))


def _userbuffers(kind: type[UserbuffersForwardLinear], ops: Ops, recipe: Recipe | None) -> Ops:
    if world_size() == 1 or getattr(recipe, "backward_override", None) is not None:
        return ops

    def match(window: Ops) -> StepFusedOperation | None:
        first: Any = window[0]
        if not isinstance(first, BasicLinear) or first._userbuffers_options is None:
            return None
        rest: list[Any] = window[1:]
        bias = rest.pop(0) if _are(rest, Bias) else None
        scatter = rest[0] if _are(rest, ReduceScatter) else None
        return kind(linear=first, bias=bias, reduce_scatter=scatter)

    return _replaced(ops, match)


def fuse_userbuffers_forward_linear(ops: Ops, *, recipe: Recipe | None) -> Ops:
    """Insert UserbuffersForwardLinear for products with `userbuffers_options`."""
    return _userbuffers(UserbuffersForwardLinear, ops, recipe)


def fuse_userbuffers_backward_linear(ops: Ops, *, recipe: Recipe | None) -> Ops:
    """Insert UserbuffersBackwardLinear for products with `userbuffers_options`."""
    return _userbuffers(UserbuffersBackwardLinear, ops, recipe)


def fuse_forward_linear_bias_add(ops: Ops, *, recipe: Recipe | None) -> Ops:
    """Insert ForwardLinearBiasAdd for a product, an optional bias and an in-place addition."""

    def match(window: Ops) -> StepFusedOperation | None:
        first, *rest = window
        if not isinstance(first, BasicLinear) or first.tensor_parallel_mode == "row":
            return None
        bias: Any = rest.pop(0) if _are(rest, Bias) else None
        if not _are(rest, AddExtraInput) or not rest[0]._in_place:  # pyright: ignore
            return None
        return ForwardLinearBiasAdd(linear=first, bias=bias, add=rest[0])  # pyright: ignore

    return _replaced(ops, match)


def fuse_forward_linear_bias_activation(ops: Ops, *, recipe: Recipe | None) -> Ops:
    """Insert ForwardLinearBiasActivation for a product in float16 or bfloat16 and a bias."""

    def match(window: Ops) -> StepFusedOperation | None:
        if not _are(window, BasicLinear, Bias):
            return None
        linear: Any = window[0]
        if linear.tensor_parallel_mode == "row" or linear.weight.dtype not in (torch.float16, torch.bfloat16):
            return None
        return ForwardLinearBiasActivation(linear=linear, bias=window[1])  # pyright: ignore[reportArgumentType]

    return _replaced(ops, match)


def fuse_forward_linear_scale_add(ops: Ops, *, recipe: Recipe | None) -> Ops:
    """Insert ForwardLinearScaleAdd for a product, a scaling and an in-place addition."""

    def match(window: Ops) -> StepFusedOperation | None:
        if not _are(window, BasicLinear, ConstantScale, AddExtraInput):
            return None
        linear, scale, add = window[:3]
        if linear.tensor_parallel_mode == "row" or not add._in_place:  # pyright: ignore
            return None
        return ForwardLinearScaleAdd(linear=linear, scale=scale, add=add)  # pyright: ignore[reportArgumentType]

    return _replaced(ops, match)


def fuse_backward_linear_add(ops: Ops, *, recipe: Recipe | None) -> Ops:
    """Insert BackwardLinearAdd for an in-place extra output and a product."""

    def match(window: Ops) -> StepFusedOperation | None:
        if not _are(window, MakeExtraOutput, BasicLinear):
            return None
        made, linear = window[:2]
        if not made._in_place or linear.tensor_parallel_mode == "column":  # pyright: ignore
            return None
        return BackwardLinearAdd(backward_add=made, linear=linear)  # pyright: ignore[reportArgumentType]

    return _replaced(ops, match)


def fuse_backward_linear_scale(ops: Ops, *, recipe: Recipe | None) -> Ops:
    """Insert BackwardLinearScale for a product and a scaling."""

    def match(window: Ops) -> StepFusedOperation | None:
        if not _are(window, BasicLinear, ConstantScale) or window[0].tensor_parallel_mode == "column":  # pyright: ignore
            return None
        return BackwardLinearScale(scale=window[1], linear=window[0])  # pyright: ignore[reportArgumentType]

    return _replaced(ops, match)


def fuse_backward_activation_bias(ops: Ops, *, recipe: Recipe | None) -> Ops:
    """Insert BackwardActivationBias for a bias and a GELU or ReLU behind an operation that quantizes its gradient."""
    if recipe is None or getattr(recipe, "backward_override", None) is not None:
        return ops
    made: Ops = []
    at = 0
    while at < len(ops):
        quantizes = bool(made) and made[-1].get_grad_output_quantizer() is not None
        if quantizes and _are(ops[at:], Bias, (GELU, ReLU)):
            made.append(BackwardActivationBias(bias=ops[at], activation=ops[at + 1]))  # pyright: ignore
            at += 2
        else:
            made.append(ops[at])
            at += 1
    return made


def fuse_backward_add_rmsnorm(ops: Ops, *, recipe: Recipe | None) -> Ops:
    """Insert BackwardAddRMSNorm for an extra output and an RMSNorm."""

    def match(window: Ops) -> StepFusedOperation | None:
        if not _are(window, MakeExtraOutput, RMSNorm) or window[0]._in_place:  # pyright: ignore
            return None
        return BackwardAddRMSNorm(add=window[0], rmsnorm=window[1])  # pyright: ignore[reportArgumentType]

    return _replaced(ops, match)


def register_fusions() -> None:
    """Register the fusions of this package, in the order in which they are applied."""
    for function in (
        fuse_userbuffers_forward_linear,
        fuse_forward_linear_bias_add,
        fuse_forward_linear_bias_activation,
        fuse_forward_linear_scale_add,
    ):
        register_forward_fusion(function)
    for function in (
        fuse_userbuffers_backward_linear,
        fuse_backward_linear_add,
        fuse_backward_linear_scale,
        fuse_backward_activation_bias,
        fuse_backward_add_rmsnorm,
    ):
        register_backward_fusion(function)
