"""OperationFuser: a chain of fusible operations as one autograd function, fused by registered functions and in kernels.

Two kinds of fusion meet here. Registered fusion functions replace operations by `FusedOperation`s; their result is
`_forward_ops` and `_backward_ops`. Neighboring operations of this package, fused or not, then run as one pass, in which
kernels compute several operations (`chain.py`). All other operations run by their own methods between such passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from ...common import env
from ...common.dispatch import undisturbed
from ...common.recipe import DelayedScaling, Recipe, revision_of
from ..distributed.recompute import state_without_gradients
from ..functions.scale_update import in_backward_pass
from ..quantization import delayed_scaling
from ..quantization.autocast import AutocastState, current, eager_thread_state
from ..runtime.autograd import check_transforms
from ..runtime.device import autocast_dtype
from .chain import describe, fusion_enabled
from .chain_run import ChainRun, Fused, FusedChain, contexts_of
from .lent_parameters import are_parametrized
from .links import Links, check_tensor, extra_inputs_error
from .operation import BasicOperation, FusibleOperation
from .pass_operation import check_parameters, has_backward_pass, has_forward_pass
from .prepared_chain import Fusions, PreparedChain, TensorCounts
from .shard_places import places_of_shards
from .tracing import NOT_TRACED, Followed, distinct_while_tracing, following
from .user_results import fused_operations

_MOST_PREPARED = 64  # kinds of calls of a chain; a full table is cleared, as shapes may vary

Fusion = Callable[..., list[FusibleOperation]]


class OperationFuser:
    """Runs a chain of operations as one differentiable function.

    Args:
        ops: The operations in order; fused operations represent their basic operations.

    Attributes:
        num_extra_inputs: Number of extra inputs that the caller gives.
        first_op_requiring_backward (int): Index of the first basic operation that the backward pass reaches.
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
            # An assignment would count as a change of the operation (`_revision`).
            object.__setattr__(op, "_captured_by_fuser", True)
        self._ops = list(ops)
        self._forward_ops: Fused = []
        self._backward_ops: Fused = []
        self.first_op_requiring_backward = 0
        self.recipe_type: type[Recipe] | None = None
        self._fused_for: Any = None
        self._is_first_forward = True
        # Chains that may be prepared: every operation has passes, and the caller handles all extra tensors.
        self._has_passes = not self._links.has_channels and all(
            has_forward_pass(op) and has_backward_pass(op) for op in self._basic_ops
        )
        self._with_facts = [type(op).call_facts is not BasicOperation.call_facts for op in self._basic_ops]
        self._prepared: dict[tuple[Any, ...], PreparedChain | None] = {}
        self._registered = self._registered_now()
        self._followed = NOT_TRACED
        self._state_without_gradients: AutocastState | None = None

    def _registered_now(self) -> tuple[list[Fusion], list[Fusion], list[Fusion]]:
        """Return the registered fusion functions: of both passes, of forward passes, of backward passes."""
        both, forward = self.forward_backward_fusion_functions, self.forward_fusion_functions
        return [*both], [*forward], [*self.backward_fusion_functions]

    @property
    def _basic_op_params(self) -> list[list[Any]]:
        """What each basic operation reads as its parameters."""
        return [op.own_tensors() for op in self._basic_ops]

    @property
    def _flat_basic_op_params(self) -> list[Any]:
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
            *extra_inputs: Extra inputs of the operations that read no channel, in order: tensors, or values that
                `BasicOperation.accept_extra_input` converts, such as a list of the split sizes of a `GroupedLinear`.
            basic_op_kwargs: Keyword arguments of each basic operation.

        Returns:
            The main output, or a tuple of the main output and the extra outputs.

        Raises:
            TypeError: An input is not a tensor.
            ValueError: The number of extra inputs or of keyword arguments does not fit.
        """
        if not parametrize._cache_enabled and are_parametrized(self._basic_ops):
            # A parametrization computes its tensor once in a call: passes and autograd read the same one.
            with parametrize.cached():
                return self(input, *extra_inputs, basic_op_kwargs=basic_op_kwargs)
        if len(extra_inputs) != self.num_extra_inputs:
            raise extra_inputs_error(len(extra_inputs), self._basic_ops)
        check_tensor("the main input", input)
        if extra_inputs:
            extra_inputs = self._links.accepted(input, extra_inputs)
        if basic_op_kwargs is not None and len(basic_op_kwargs) != self._num_basic_ops:
            raise ValueError(
                f"basic_op_kwargs has {len(basic_op_kwargs)} entries for {self._num_basic_ops} basic operations; give "
                "one dict for each"
            )
        if self._is_first_forward:
            for op in self._ops:
                op.pre_first_fuser_forward()
            self._ops, self._is_first_forward = self._basic_ops, False
        if self._has_passes and not torch.compiler.is_compiling() and not any(basic_op_kwargs or ()):
            thread = eager_thread_state()
            state = thread.state
            before = self._state_without_gradients
            if before is not state and (before is not None or not torch.is_grad_enabled()):
                self._state_without_gradients = state_without_gradients("te.ops", before, state)
            recipe = state.recipe if state.enabled or state.calibrating else None
            if not self._followed.is_current(recipe, state.group, self._basic_ops):
                ops = self._basic_ops
                following(ops, state)
                stateful = any(op.has_scaling_state() for op in ops)
                served = [op._served for op in ops]
                self._followed = Followed(
                    recipe, revision_of(recipe), state.group, served, stateful, delayed_scaling.pools()
                )
            repeats = self._followed.stateful and (thread.recomputes or in_backward_pass())
            if undisturbed() and not repeats:
                key, given = self._key(state, input, extra_inputs)
                chain = self._prepared.get(key)
                if chain is None and key not in self._prepared:
                    chain = self._prepare(key, state, input, extra_inputs)
                if chain is not None:
                    if chain.fusions.key is not self._fused_for:
                        self._forward_ops, self._backward_ops, self.recipe_type, self._fused_for = (
                            chain.fusions
                        )
                        self.first_op_requiring_backward = chain.first
                    for check in chain.checks:
                        check()
                    return chain(given)
        return self._run_segments(input, extra_inputs, basic_op_kwargs)

    def _run_segments(
        self, x: Tensor, extra_inputs: tuple[Tensor, ...], basic_op_kwargs: list[dict[str, Any]] | None
    ) -> Any:
        """Run a chain that is not prepared: operations of users, channels, recomputation, tracing."""
        options = [{}] * self._num_basic_ops if basic_op_kwargs is None else basic_op_kwargs
        check_parameters(self._basic_ops)
        state = current()
        following(self._basic_ops, state)
        parameters = self._basic_op_params
        first = self._first_requiring_backward(x, parameters, extra_inputs)
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
            x, *tensors = distinct_while_tracing((x, *flat, *extra_inputs))
            results = FusedChain.apply(x, call, *tensors)
        else:
            check_transforms(FusedChain.OPERATION, x, flat, extra_inputs)
            results = call.forward(x, extra_inputs)[0]
        made: Any = results
        return made if len(made) > 1 else made[0]

    def _key(
        self, state: AutocastState, x: Tensor, extra_inputs: tuple[Tensor, ...]
    ) -> tuple[tuple[Any, ...], list[Any]]:
        """Return everything that a prepared chain depends on, and the inputs of its forward pass.

        A write to an attribute of an operation changes its `_revision`, and so does another recipe.
        """
        both, forward, backward = self._registered
        if (
            self.forward_fusion_functions != forward
            or self.backward_fusion_functions != backward
            or self.forward_backward_fusion_functions != both
        ):
            self._prepared.clear()
            self._registered = self._registered_now()
        device = x.device
        key: list[Any] = [
            torch.is_grad_enabled(),
            autocast_dtype(device.type),
            env.generation(),
            state.enabled,
            fusion_enabled(),
            (type(x), x.shape, x.dtype, device, x.requires_grad),
        ]
        given: list[Any] = [x]
        at = 0
        basic_ops: list[Any] = self._basic_ops  # each has passes
        for op, has_facts in zip(basic_ops, self._with_facts, strict=True):
            key += (op._revision, op.training)
            for tensor in [getattr(op, name) for name in op.parameter_names]:
                if tensor is None:
                    key.append(None)
                    continue
                given.append(tensor)
                key.append((type(tensor), tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad))
            extra: tuple[Tensor, ...] = ()
            if op.num_extra_inputs:
                extra = extra_inputs[at : at + op.num_extra_inputs]
                at += op.num_extra_inputs
                given += extra
                key += [(type(t), t.shape, t.dtype, t.device, t.requires_grad) for t in extra]
            if has_facts:
                key.append(op.call_facts(extra))
        return tuple(key), given

    def _prepare(
        self, key: tuple[Any, ...], state: AutocastState, x: Tensor, extra_inputs: tuple[Tensor, ...]
    ) -> PreparedChain | None:
        """Return the prepared chain of a key, built in its first call; None if it does not run as one pass.

        All operations have passes; fused operations of users may not.
        """
        check_parameters(self._basic_ops)
        parameters = self._basic_op_params
        first = self._first_requiring_backward(x, parameters, extra_inputs)
        self._fuse(first, state)
        chain = None
        if all(has_forward_pass(op) for op, _ in self._forward_ops) and all(
            has_backward_pass(op) for op, _ in self._backward_ops
        ):
            for op, indices in self._forward_ops:
                op.pre_fuser_forward(requires_grad=indices[-1] >= first)
            extra = self._links.given(extra_inputs)
            contexts = contexts_of(self._num_basic_ops, first, x)
            options: list[dict[str, Any]] = [{}] * self._num_basic_ops
            records = torch.is_grad_enabled()
            passes, read = describe(self._basic_ops, contexts, x, extra, options, records)  # pyright: ignore
            # Gradients are returned in the order of the parameters.
            if all(
                list(map(id, own)) == list(map(id, held)) for own, held in zip(read, parameters, strict=True)
            ):
                counts = [
                    TensorCounts(len(own), op.num_extra_inputs, op.num_extra_outputs)
                    for op, own in zip(self._basic_ops, parameters, strict=True)
                ]
                fusions = Fusions(self._forward_ops, self._backward_ops, self.recipe_type, self._fused_for)
                stateful = state.enabled and self._followed.stateful
                chain = PreparedChain(passes, tuple(counts), first, stateful, x.device, fusion_enabled())
                chain.fusions, chain.shards = fusions, places_of_shards(self._basic_ops)
                # The checks before a forward pass that depend on more than the key of a prepared chain.
                chain.checks = tuple(
                    [
                        partial(op.pre_fuser_forward, requires_grad=i >= first)
                        for i, op in enumerate(self._basic_ops)
                        if type(op).pre_fuser_forward is not FusibleOperation.pre_fuser_forward
                        and getattr(op, "_accumulate_into_main_grad", True)
                    ]
                )
        if len(self._prepared) >= _MOST_PREPARED:
            self._prepared.clear()
        self._prepared[key] = chain
        return chain

    def _first_requiring_backward(
        self, x: Tensor, parameters: list[list[Any]], extra_inputs: tuple[Tensor, ...]
    ) -> int:
        """Return the index of the first operation with a gradient to compute; their number if no operation has one."""
        if not torch.is_grad_enabled():
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
        registered = self._registered_now()
        kind = None if recipe is None else type(recipe)
        key = (length, override, first, registered)
        # Torch 2.11 traces the identity of two classes, and not their equality inside of a tuple.
        if kind is self.recipe_type and key == self._fused_for:
            return
        both = self._fused(self._basic_ops, registered[0], recipe)
        self._forward_ops = self._with_indices(self._fused(both, registered[1], recipe))
        self._backward_ops = self._with_indices(self._fused(both, registered[2], recipe))
        self.first_op_requiring_backward = first
        self.recipe_type = kind
        self._fused_for = key

    def _fused(
        self, ops: Sequence[FusibleOperation], functions: Sequence[Fusion], recipe: Recipe | None
    ) -> list[FusibleOperation]:
        ops = list(ops)
        for function in functions:
            ops = fused_operations(function, function(ops, recipe=recipe))
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


def register_forward_fusion(op_fusion_func: Fusion, prepend: bool = False) -> None:
    """Register a function that replaces operations by fused ones in forward passes.

    Args:
        op_fusion_func: function(ops, recipe=recipe) -> ops, lists of operations in order. Each fused operation that it
            introduces must represent exactly the basic operations that it replaces.
        prepend: Apply the function before those registered earlier.
    """
    _register(OperationFuser.forward_fusion_functions, op_fusion_func, prepend)


def register_backward_fusion(op_fusion_func: Fusion, prepend: bool = False) -> None:
    """Register a function that replaces operations by fused ones in backward passes.

    The other arguments are those of `register_forward_fusion`.
    """
    _register(OperationFuser.backward_fusion_functions, op_fusion_func, prepend)


def register_forward_backward_fusion(op_fusion_func: Fusion, prepend: bool = False) -> None:
    """Register a function that replaces operations by fused ones in both passes, before the functions of one pass.

    The other arguments are those of `register_forward_fusion`.
    """
    _register(OperationFuser.forward_backward_fusion_functions, op_fusion_func, prepend)


def _register(functions: list[Fusion], function: Fusion, prepend: bool) -> None:
    if not callable(function):
        raise TypeError(
            f"{function!r} is not callable; give a function(ops, recipe=recipe) that returns operations"
        )
    functions.insert(0 if prepend else len(functions), function)


FusibleOperation._fuser = OperationFuser
