"""Fused operations with the names of the original, and the functions that insert them, greedily from left to right.

Each class here describes the basic operations that it replaces, for clients that inspect a chain. A
class does not change what is computed: a chain runs the passes of the basic operations, and
`passes/patterns.py` and the casts of `chain.py` determine what a kernel computes together.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

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
from ..pass_operation import PassFusedOperation, has_passes

Ops = list[FusibleOperation]


def _present(*ops: BasicOperation | None) -> list[BasicOperation]:
    return [op for op in ops if op is not None]


class ForwardLinearBiasActivation(PassFusedOperation):
    """A product with its bias in the epilogue. The name is the original's; an activation is a separate kernel.

    Args:
        linear: The product.
        bias: The bias.
        activation: Must be None.
    """

    def __init__(
        self, *, linear: BasicLinear, bias: Bias | None, activation: BasicOperation | None = None
    ) -> None:
        super().__init__(_present(linear, bias, activation))
        self._has_activation = activation is not None

    def pre_fuser_forward(self, *, requires_grad: bool) -> None:
        if self._has_activation:
            raise NotImplementedError(
                "activation is unsupported; give activation=None and put the activation behind the fused operation"
            )
        super().pre_fuser_forward(requires_grad=requires_grad)


class ForwardLinearBiasAdd(PassFusedOperation):
    """A product and a bias, accumulated into an extra input.

    Args:
        linear: The product.
        bias: The bias, or None.
        add: The in-place addition.
    """

    def __init__(
        self, *, linear: BasicLinear, bias: Bias | None = None, add: AddExtraInput
    ) -> None:
        super().__init__(_present(linear, bias, add))


class ForwardLinearScaleAdd(PassFusedOperation):
    """A scaled product, accumulated into an extra input.

    Args:
        linear: The product.
        scale: The scaling.
        add: The in-place addition.
    """

    def __init__(self, *, linear: BasicLinear, scale: ConstantScale, add: AddExtraInput) -> None:
        super().__init__([linear, scale, add])


class BackwardLinearAdd(PassFusedOperation):
    """An input gradient, accumulated into an extra output gradient.

    Args:
        backward_add: The extra output.
        linear: The product.
    """

    def __init__(self, *, backward_add: MakeExtraOutput, linear: BasicLinear) -> None:
        super().__init__([backward_add, linear])


class BackwardLinearScale(PassFusedOperation):
    """The gradients of a scaled product.

    Args:
        scale: The scaling.
        linear: The product.
    """

    def __init__(self, *, scale: ConstantScale, linear: BasicLinear) -> None:
        super().__init__([linear, scale])


class BackwardActivationBias(PassFusedOperation):
    """Bias and activation gradients, quantized for the operation before.

    Args:
        bias: The bias.
        activation: The activation.
    """

    def __init__(self, *, bias: Bias, activation: BasicOperation) -> None:
        super().__init__([bias, activation])


class BackwardAddRMSNorm(PassFusedOperation):
    """RMSNorm gradient and extra output gradient, added.

    Args:
        add: The extra output.
        rmsnorm: The norm.
    """

    def __init__(self, *, add: MakeExtraOutput, rmsnorm: RMSNorm) -> None:
        super().__init__([add, rmsnorm])


class UserbuffersForwardLinear(PassFusedOperation):
    """Product, bias and reduce-scatter in a tensor-parallel layer.

    Args:
        linear: The product.
        bias: The bias, or None.
        reduce_scatter: The reduction, or None.
    """

    def __init__(
        self,
        *,
        linear: BasicLinear,
        bias: Bias | None = None,
        reduce_scatter: ReduceScatter | None = None,
    ) -> None:
        super().__init__(_present(linear, bias, reduce_scatter))


class UserbuffersBackwardLinear(UserbuffersForwardLinear):
    """The backward pass through the operations in `UserbuffersForwardLinear`, with the same arguments."""


class FusionRule(NamedTuple):
    """Consecutive operations that a fused operation replaces.

    Attributes:
        fused: Fused operation class.
        kinds: Operation classes.
        names: Their keyword arguments in the constructor of the fused operation.
        sharded: Tensor-parallel product mode that excludes it.
        in_place: The residual connection must be in place (True) or must not be (False); None for either.
        narrow: The weight must have dtype float16 or bfloat16.
        userbuffers: The product must have `userbuffers_options`.
    """

    fused: Callable[..., PassFusedOperation]
    kinds: tuple[type, ...]
    names: tuple[str, ...]
    sharded: str | None = None
    in_place: bool | None = None
    narrow: bool = False
    userbuffers: bool = False

    def match(self, ops: Ops) -> PassFusedOperation | None:
        """Return the fused operation that replaces the first operations in a list; None if they do not match."""
        candidates: list[Any] = ops[: len(self.kinds)]
        if len(candidates) < len(self.kinds) or not all(map(isinstance, candidates, self.kinds)):
            return None
        # A fused operation would skip methods that a user overrides.
        if not all(map(has_passes, candidates)):
            return None
        for op in candidates:
            if isinstance(op, BasicLinear):
                fits = (
                    (self.sharded is None or op.tensor_parallel_mode != self.sharded)
                    and (not self.narrow or op.weight.dtype in (torch.float16, torch.bfloat16))
                    and (not self.userbuffers or op._userbuffers_options is not None)
                )
            elif isinstance(op, (AddExtraInput, MakeExtraOutput)):
                fits = self.in_place in (None, op._in_place)
            else:
                fits = True
            if not fits:
                return None
        return self.fused(**dict(zip(self.names, candidates, strict=True)))


def _userbuffers(fused: type[UserbuffersForwardLinear]) -> tuple[FusionRule, ...]:
    rows = (
        ((BasicLinear, Bias, ReduceScatter), ("linear", "bias", "reduce_scatter")),
        ((BasicLinear, Bias), ("linear", "bias")),
        ((BasicLinear, ReduceScatter), ("linear", "reduce_scatter")),
        ((BasicLinear,), ("linear",)),
    )
    return tuple([FusionRule(fused, kinds, names, userbuffers=True) for kinds, names in rows])


_ADD = ForwardLinearBiasAdd
_LINEAR, _LINEAR_BIAS = (BasicLinear,), (BasicLinear, Bias)
# Rules in the order in which they are applied; the first matching rule in a row replaces operations.
FORWARD_RULES: tuple[tuple[FusionRule, ...], ...] = (
    _userbuffers(UserbuffersForwardLinear),
    (
        FusionRule(
            _ADD,
            (*_LINEAR_BIAS, AddExtraInput),
            ("linear", "bias", "add"),
            sharded="row",
            in_place=True,
        ),
        FusionRule(
            _ADD, (BasicLinear, AddExtraInput), ("linear", "add"), sharded="row", in_place=True
        ),
    ),
    (
        FusionRule(
            ForwardLinearBiasActivation,
            _LINEAR_BIAS,
            ("linear", "bias"),
            sharded="row",
            narrow=True,
        ),
    ),
    (
        FusionRule(
            ForwardLinearScaleAdd,
            (BasicLinear, ConstantScale, AddExtraInput),
            ("linear", "scale", "add"),
            sharded="row",
            in_place=True,
        ),
    ),
)
BACKWARD_RULES: tuple[tuple[FusionRule, ...], ...] = (
    _userbuffers(UserbuffersBackwardLinear),
    (
        FusionRule(
            BackwardLinearAdd,
            (MakeExtraOutput, BasicLinear),
            ("backward_add", "linear"),
            sharded="column",
            in_place=True,
        ),
    ),
    (
        FusionRule(
            BackwardLinearScale, (BasicLinear, ConstantScale), ("linear", "scale"), sharded="column"
        ),
    ),
)
NORM_RULES = (
    FusionRule(BackwardAddRMSNorm, (MakeExtraOutput, RMSNorm), ("add", "rmsnorm"), in_place=False),
)


def fuse(ops: Ops, *, recipe: Recipe | None, rules: tuple[FusionRule, ...]) -> Ops:
    """Replace operations by the first rule that matches, greedily from left to right."""
    if rules[0].userbuffers and (
        world_size() == 1 or getattr(recipe, "backward_override", None) is not None
    ):
        return ops
    result: Ops = []
    position = 0
    while position < len(ops):
        fused = next(filter(None, (rule.match(ops[position:]) for rule in rules)), None)
        if fused is None:
            result.append(ops[position])
            position += 1
        else:
            result.append(fused)
            position += len(fused.basic_ops)
    return result


def fuse_backward_activation_bias(ops: Ops, *, recipe: Recipe | None) -> Ops:
    """Insert BackwardActivationBias for a bias and a GELU or ReLU behind an operation that quantizes its gradient."""
    if recipe is None or getattr(recipe, "backward_override", None) is not None:
        return ops
    result: Ops = []
    position = 0
    while position < len(ops):
        bias = ops[position]
        activation = ops[position + 1] if position + 1 < len(ops) else None
        quantizes = len(result) > 0 and result[-1].get_grad_output_quantizer() is not None
        fits = has_passes(bias) and activation is not None and has_passes(activation)
        if quantizes and fits and isinstance(bias, Bias) and isinstance(activation, (GELU, ReLU)):
            result.append(BackwardActivationBias(bias=bias, activation=activation))
            position += 2
        else:
            result.append(ops[position])
            position += 1
    return result


def register_fusions() -> None:
    """Register the fusions of this package, in the order in which they are applied."""
    for rules in FORWARD_RULES:
        register_forward_fusion(partial(fuse, rules=rules))
    for rules in BACKWARD_RULES:
        register_backward_fusion(partial(fuse, rules=rules))
    register_backward_fusion(fuse_backward_activation_bias)
    register_backward_fusion(partial(fuse, rules=NORM_RULES))
