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
from ..functions.saving import keep, take_saved
from ..functions.scale_update import ScaleUpdate
from ..quantization.autocast import AutocastState, current
from ..runtime.double_backward import once_differentiable
from .chain import run_backward, run_forward
from .links import Links
from .operation import BasicOperation, FusibleOperation, OperationContext
from .pass_builder import ChainEnvironment
from .step_operation import contributes_backward, contributes_forward
from .recipe_slots import following, update_of

Fusion = Callable[..., list[FusibleOperation]]
Fused = list[tuple[FusibleOperation, list[int]]]


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
        call = _Run(self, first, list(map(len, parameters)), options, state)
        if first < self._num_basic_ops:
            results = _FusedChain.apply(input, call, *flat, *extra_inputs)
        else:
            results = call.forward(input, extra_inputs)[0]
        made: Any = results
        return made if len(made) > 1 else made[0]

    def _prepare(self) -> None:
        for op in self._basic_ops:
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
            if any([tensor.requires_grad for tensor in tensors]):
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
            [member is own for member, own in zip(basic, self._basic_ops, strict=True)]
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


class _Run:
    """One call of a fuser: its contexts, and both passes over the operations."""

    def __init__(
        self,
        fuser: OperationFuser,
        first: int,
        parameters: list[int],
        options: Sequence[dict[str, Any]],
        state: AutocastState,
    ) -> None:
        self.basic_ops, self.links = fuser._basic_ops, fuser._links
        self.forward_ops, self.backward_ops = fuser._forward_ops, fuser._backward_ops
        self.first, self.parameters, self.options, self.state = first, parameters, options, state
        self.contexts: list[OperationContext] = []
        # Operations that a registered fused operation replaces in the backward pass.
        self._opaque_backward = {
            i
            for op, indices in self.backward_ops
            if op.is_fused_op and not contributes_backward(op)
            for i in indices
        }
        self.override = getattr(state.recipe, "backward_override", None) if state.enabled else None

    def forward(self, x: Tensor, extra_inputs: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], list[Any]]:
        """Return (main output, extra outputs for the caller..), and the tensors to save."""
        count = len(self.basic_ops)
        self.contexts = [
            OperationContext(
                requires_grad=i >= self.first,
                input_requires_grad=i > self.first or (i == self.first == 0 and x.requires_grad),
            )
            for i in range(count)
        ]
        environment = ChainEnvironment()
        given = self.links.given(extra_inputs)
        outputs: list[tuple[Any, ...]] = [()] * count
        ops_of_steps = _apart(self.forward_ops, contributes_forward)
        stepwise = {i for op, indices in ops_of_steps if contributes_forward(op) for i in indices}

        def joins(before: Sequence[int], behind: Sequence[int]) -> bool:
            return stepwise.issuperset((before[-1], behind[0])) and not self.links.connects(before, behind)

        for segment in _segments(ops_of_steps, joins):
            indices = [i for _, members in segment for i in members]
            received = self.links.received(given, outputs, indices)
            ops = [self.basic_ops[i] for i in indices]
            ctxs, options = [self.contexts[i] for i in indices], [self.options[i] for i in indices]
            if indices[0] in stepwise:
                x, made = run_forward(ops, ctxs, x, received, options, environment, indices[0])
            else:
                x, made = self._run_opaque(segment[0][0], indices, x, received, options)
            for i, extra in zip(indices, made, strict=True):
                outputs[i] = tuple(extra)
                self.links.check_outputs(i, outputs[i])
        saved: list[Any] = []
        for ctx in self.contexts:
            tensors = ctx.to_save or ()
            ctx._saved_range = (len(saved), len(saved) + len(tensors))
            ctx.to_save = None
            saved += tensors
        return (x, *self.links.returned(outputs)), saved

    def _run_opaque(
        self, op: FusibleOperation, indices: list[int], x: Tensor, received: list[Any], options: list[Any]
    ) -> tuple[Any, list[Any]]:
        """Run an operation by its own method, between passes of other operations."""
        before, behind = indices[0] - 1, indices[-1] + 1
        previous = self.basic_ops[before] if before >= 0 and self.override is None else None
        following_op = self.basic_ops[behind] if behind < len(self.basic_ops) else None
        tensors = [x, *op.parameters(), *[tensor for extra in received for tensor in extra]]
        _keep_storage(tensors)
        output, extra = op.fuser_forward(
            [self.contexts[i] for i in indices],
            x,
            basic_op_extra_inputs=[tuple(tensors) for tensors in received],
            prev_op_grad_output_quantizer=None if previous is None else previous.get_grad_output_quantizer(),
            next_op_input_quantizer=None if following_op is None else following_op.get_input_quantizer(),
            basic_op_kwargs=options,
        )
        made = [tuple(tensors) for tensors in extra]
        _keep_storage([output, *[tensor for tensors in made for tensor in tensors]])
        return output, made

    def backward(
        self, saved: Sequence[Any], grad_output: Any, grad_extra: Sequence[Any]
    ) -> tuple[Any, list[Any], list[Any]]:
        """Return the gradients of the main input, of all parameters, and of the caller's extra inputs."""
        count = len(self.basic_ops)
        for ctx in self.contexts:
            begin, end = ctx._saved_range or (0, 0)
            ctx.saved_tensors = tuple(saved[begin:end])
        del saved
        parameters: list[tuple[Any, ...]] = [(None,) * n for n in self.parameters]
        extra_inputs: list[tuple[Any, ...]] = [(None,) * op.num_extra_inputs for op in self.basic_ops]
        given = self.links.given_gradients(grad_extra)
        dy = grad_output
        apart = _apart(self.backward_ops, self._backward_of_steps)
        reached = [entry for entry in apart if entry[1][-1] >= self.first]

        def joins(before: Sequence[int], behind: Sequence[int]) -> bool:
            same = _environment(self.contexts, before) is _environment(self.contexts, behind)
            return same and self._stepwise(before) and self._stepwise(behind) and not self.links.connects(before, behind)

        for segment in reversed(_segments(reached, joins)):
            indices = [i for _, members in segment for i in members]
            ctxs = [self.contexts[i] for i in indices]
            grads = [self.links.gradients_of_outputs(i, given, extra_inputs) for i in indices]
            if self._stepwise(indices):
                dy, made, extra = run_backward(ctxs, dy, grads)
            else:
                dy, made, extra = segment[0][0].fuser_backward(  # pyright: ignore[reportAssignmentType]
                    ctxs, dy, basic_op_grad_extra_outputs=grads
                )
            for i, of_parameters, of_inputs in zip(indices, made, extra, strict=True):
                self._check_gradients(i, tuple(of_parameters))
                parameters[i], extra_inputs[i] = tuple(of_parameters), tuple(of_inputs)
                self.contexts[i].saved_tensors = None
        if count and self.first > 0:
            dy = None
        flat = [grad for group in parameters for grad in group]
        return dy, flat, self.links.public_gradients(extra_inputs)

    def _backward_of_steps(self, op: FusibleOperation) -> bool:
        """Return whether an operation's backward pass is made of steps, of forward passes that were too."""
        members = [i for i, basic in enumerate(self.basic_ops) if basic in op.basic_operations() and i >= self.first]
        return contributes_backward(op) and self._have_steps(members)

    def _have_steps(self, indices: Sequence[int]) -> bool:
        return all([hasattr(self.contexts[i], "step_state") for i in indices])

    def _stepwise(self, indices: Sequence[int]) -> bool:
        """Return whether single operations run by their steps in the backward pass."""
        own = all([contributes_backward(self.basic_ops[i]) for i in indices])
        return own and self._have_steps(indices) and not self._opaque_backward.intersection(indices)

    def _check_gradients(self, index: int, grads: tuple[Any, ...]) -> None:
        if len(grads) != self.parameters[index]:
            raise RuntimeError(
                f"the backward pass of {type(self.basic_ops[index]).__name__} returned {len(grads)} parameter gradients "
                f"for {self.parameters[index]} parameters; return one for each parameter, None where there is none"
            )


def _apart(ops: Fused, of_steps: Callable[[FusibleOperation], bool]) -> Fused:
    """Replace fused operations that contribute steps by their basic operations, whose steps the rules merge."""
    made: Fused = []
    for op, indices in ops:
        if op.is_fused_op and of_steps(op):
            made += [(basic, [i]) for basic, i in zip(op.basic_operations(), indices, strict=True)]
        else:
            made.append((op, indices))
    return made


def _segments(ops: Fused, joins: Callable[[Sequence[int], Sequence[int]], bool]) -> list[Fused]:
    """Cut a chain into runs of operations: joins(indices before, indices behind) is True where a run goes on."""
    segments: list[Fused] = []
    for op, indices in ops:
        before = [i for _, members in segments[-1] for i in members] if segments else []
        if before and joins(before, indices):
            segments[-1].append((op, indices))
        else:
            segments.append([(op, indices)])
    return segments


def _environment(contexts: Any, indices: Sequence[int]) -> Any:
    state = getattr(contexts[indices[-1]], "step_state", None)
    return None if state is None else state.environment


def _keep_storage(tensors: Sequence[Any]) -> None:
    """Mark tensors whose memory an operation must not free after use."""
    if torch.compiler.is_compiling():
        return
    for tensor in tensors:
        if tensor is not None:
            tensor._do_not_clear = True


class _FusedChain(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, call, *tensors):
        count = sum(call.parameters)
        results, saved = call.forward(x, tensors[count:])
        keep(ctx, saved)
        ctx.call = call
        ctx.scale_update = update_of(call.basic_ops, call.state)
        outputs = _distinct(results, (x, *tensors))
        ctx.mark_non_differentiable(*[y for y in outputs if not y.is_floating_point()])
        ctx.set_materialize_grads(False)
        ctx.output = (outputs[0].shape, outputs[0].dtype, outputs[0].device)
        return outputs

    @staticmethod
    @once_differentiable("Sequential")
    def backward(ctx, grad_output, *grad_extra):  # pyright: ignore[reportIncompatibleMethodOverride]
        call: _Run = ctx.call
        if grad_output is None:  # only extra outputs were used
            shape, dtype, device = ctx.output
            grad_output = torch.zeros(shape, dtype=dtype, device=device)
        grad_input, parameters, extra = call.backward(take_saved(ctx), grad_output, grad_extra)
        update: ScaleUpdate | None = ctx.scale_update
        if update is not None:
            update.run()
        return grad_input, None, *parameters, *extra


def _distinct(results: Sequence[Tensor], inputs: Sequence[Any]) -> tuple[Tensor, ...]:
    """Return results that are different objects, and none of the inputs, for autograd to attach its history to."""
    seen = {id(tensor) for tensor in inputs}
    made: list[Tensor] = []
    for result in results:
        if id(result) in seen:
            result = result.detach()
        seen.add(id(result))
        made.append(result)
    return tuple(made)


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
        raise TypeError(f"{function!r} is not callable; give a function(ops, recipe=recipe) that returns operations")
    functions.insert(0 if prepend else len(functions), function)
