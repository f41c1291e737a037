"""OperationFuser: a chain of fusible operations as one autograd function, fused by registered functions and by rules.

Two kinds of fusion meet here. Registered fusion functions replace operations by `FusedOperation`s; their result is
`_forward_ops` and `_backward_ops`. Neighbouring operations that contribute steps, fused or not, then run as one pass,
whose steps are merged by rules (`chain.py`). All other operations run by their own methods between such passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...common.recipe import DelayedScaling, Recipe
from ..quantization.autocast import AutocastState, current
from .chain_run import ChainRun, Fused, FusedChain
from .links import Links
from .operation import BasicOperation, FusibleOperation
from .tracing import following

Fusion = Callable[..., list[FusibleOperation]]


class OperationFuser:
    """Runs a chain of operations as one differentiable function.

    Args:
        ops: The operations in order; fused operations stand for their basic operations.

    Attributes:
        num_extra_inputs: Number of extra inputs that the caller gives.
        first_op_requiring_backward: Index of the first basic operation that the backward pass reaches.
        recipe_type: Class of the active recipe; None without one.
        forward_fusion_functions: Functions of `register_forward_fusion`.
        backward_fusion_functions: Functions of `register_backward_fusion`.
        forward_backward_fusion_functions: Functions of `register_forward_backward_fusion`.
    """

    forward_fusion_functions: list[Fusion] = []
    backward_fusion_functions: list[Fusion] = []
    forward_backward_fusion_functions: list[Fusion] = []

    def __init__(self, ops: Sequence[FusibleOperation]) -> None:
        self._basic_ops: list[BasicOperation] = [basic for op in ops for basic in op.basic_operations()]
        self._num_basic_ops = len(self._basic_ops)
        self._links = Links(self._basic_ops)
        self.num_extra_inputs: int = len(self._links.public_inputs)
        for op in self._basic_ops:
            op._captured_by_fuser = True
        self._ops = list(ops)
        self._forward_ops: Fused = []
        self._backward_ops: Fused = []
        self.first_op_requiring_backward = 0
        self.recipe_type: type[Recipe] | None = None
        self._fused_for: Any = None
        self._is_first_forward = True

    @property
    def _basic_op_params(self) -> list[list[torch.nn.Parameter]]:
        """The parameters of each basic operation."""
        return [list(op.parameters()) for op in self._basic_ops]

    @property
    def _flat_basic_op_params(self) -> list[torch.nn.Parameter]:
        """The parameters of all basic operations."""
        return [parameter for parameters in self._basic_op_params for parameter in parameters]

    def __call__(
        self,
        input: Tensor,
        *extra_inputs: Tensor,
        basic_op_kwargs: list[dict[str, Any]] | None = None,
    ) -> Any:
        """Run the operations.

        Args:
            input: The main input.
            *extra_inputs: Extra inputs of the operations that read no channel, in order.
            basic_op_kwargs: Keyword arguments of each basic operation.

        Returns:
            The main output, or a tuple of the main output and the extra outputs.

        Raises:
            ValueError: The number of extra inputs or of keyword arguments does not fit.
        """
        if len(extra_inputs) != self.num_extra_inputs:
            raise ValueError(
                f"got {len(extra_inputs)} extra inputs, but the operations read {self.num_extra_inputs}; give one "
                "tensor for each extra input, in the order of the operations"
            )
        options = [{}] * self._num_basic_ops if basic_op_kwargs is None else basic_op_kwargs
        if len(options) != self._num_basic_ops:
            raise ValueError(
                f"basic_op_kwargs has {len(options)} entries for {self._num_basic_ops} basic operations; give one dict "
                "for each"
            )
        if self._is_first_forward:
            self._prepare()
        state = current()
        following(self._basic_ops, state)
        parameters = self._basic_op_params
        records = torch.is_grad_enabled()
        first = self._first_requiring_backward(records, input, parameters, extra_inputs)
        self._fuse(first, state)
        for op, indices in self._forward_ops:
            op.pre_fuser_forward(requires_grad=indices[-1] >= first)
        flat = [parameter for group in parameters for parameter in group]
        call = ChainRun(
            self._basic_ops,
            self._links,
            (self._forward_ops, self._backward_ops),
            first,
            list(map(len, parameters)),
            options,
            state,
        )
        if first < self._num_basic_ops:
            results = FusedChain.apply(input, call, *flat, *extra_inputs)
        else:
            results = call.forward(input, extra_inputs)[0]
        made: Any = results
        return made if len(made) > 1 else made[0]

    def _prepare(self) -> None:
        for op in self._ops:
            op.pre_first_fuser_forward()
        self._is_first_forward = False

    def _first_requiring_backward(
        self, records: bool, x: Tensor, parameters: list[list[Any]], extra_inputs: tuple[Tensor, ...]
    ) -> int:
        """Return the index of the first operation with a gradient to compute; their number if there is none."""
        if not records:
            return self._num_basic_ops
        if x.requires_grad:
            return 0
        given = self._links.given(extra_inputs)
        for i, held in enumerate(parameters):
            tensors = [*held, *[tensor for tensor in given[i] if tensor is not None]]
            if any(tensor.requires_grad for tensor in tensors):
                return i
        return self._num_basic_ops

    def _fuse(self, first: int, state: AutocastState) -> None:
        """Apply the registered fusions where anything that they may depend on has changed."""
        recipe = state.recipe if state.enabled else None
        length = recipe.amax_history_len if isinstance(recipe, DelayedScaling) else None
        override = getattr(recipe, "backward_override", None)
        registered = tuple(
            [
                tuple(functions)
                for functions in (
                    self.forward_backward_fusion_functions,
                    self.forward_fusion_functions,
                    self.backward_fusion_functions,
                )
            ]
        )
        key = (type(recipe), length, override, first, registered)
        if key == self._fused_for:
            return
        both = self._fused(self._basic_ops, registered[0], recipe)
        self._forward_ops = self._with_indices(self._fused(both, registered[1], recipe))
        self._backward_ops = self._with_indices(self._fused(both, registered[2], recipe))
        self.first_op_requiring_backward = first
        self.recipe_type = None if recipe is None else type(recipe)
        self._fused_for = key

    def _fused(
        self, ops: Sequence[FusibleOperation], functions: Sequence[Fusion], recipe: Recipe | None
    ) -> list[FusibleOperation]:
        ops = list(ops)
        for function in functions:
            ops = list(function(ops, recipe=recipe))
        basic = [member for op in ops for member in op.basic_operations()]
        same = len(basic) == self._num_basic_ops and all(
            member is own for member, own in zip(basic, self._basic_ops, strict=True)
        )
        if not same:
            raise RuntimeError(
                f"mismatch after fusing: the operations {[type(op).__name__ for op in ops]} do not cover the basic "
                f"operations {[type(op).__name__ for op in self._basic_ops]} once each in their order; a fusion "
                "function must replace operations by FusedOperations of exactly these operations"
            )
        return ops

    def _with_indices(self, ops: Sequence[FusibleOperation]) -> Fused:
        fused: Fused = []
        at = 0
        for op in ops:
            count = len(op.basic_operations())
            fused.append((op, list(range(at, at + count))))
            at += count
        return fused


def register_forward_fusion(function: Fusion, prepend: bool = False) -> None:
    """Register a function that replaces operations by fused ones in forward passes.

    Args:
        function: function(ops, recipe=recipe) -> ops, lists of operations in order. Each fused operation that it
            introduces must stand for exactly the basic operations that it replaces.
        prepend: Apply the function before those registered earlier.
    """
    _register(OperationFuser.forward_fusion_functions, function, prepend)


def register_backward_fusion(function: Fusion, prepend: bool = False) -> None:
    """Register a function that replaces operations by fused ones in backward passes; see `register_forward_fusion`."""
    _register(OperationFuser.backward_fusion_functions, function, prepend)


def register_forward_backward_fusion(function: Fusion, prepend: bool = False) -> None:
    """Register a function that replaces operations by fused ones in both passes.

    It is applied before the functions of one pass; see `register_forward_fusion`.
    """
    _register(OperationFuser.forward_backward_fusion_functions, function, prepend)


def _register(functions: list[Fusion], function: Fusion, prepend: bool) -> None:
    if not callable(function):
        raise TypeError(
            f"{function!r} is not callable; give a function(ops, recipe=recipe) that returns operations"
        )
    functions.insert(0 if prepend else len(functions), function)


FusibleOperation._fuser = OperationFuser
