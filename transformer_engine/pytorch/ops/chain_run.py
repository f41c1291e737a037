"""A call that runs a chain in segments: contexts, forward and backward pass, and the autograd function.

A segment is a list of consecutive operations that run as one pass (`chain.py`), or a single operation that a user
wrote, which runs by its own methods `fuser_forward` and `fuser_backward`. The writer and reader of a channel belong
to different segments. Each pass has its own segments, because a registered fusion may replace one pass alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from ..functions.saving import save_tensors, take_saved
from ..functions.scale_update import ScaleUpdate
from ..quantization.autocast import AutocastState
from ..runtime.autograd import Function, check_transforms
from ..runtime.double_backward import once_differentiable
from ..tensor.quantized_tensor import QuantizedTensor, QuantizedTensorStorage
from .applied_recipe import distinct_while_tracing, scale_update
from .chain import copy_in_traces, run_backward, run_forward
from .fusions import FusionResults, IndexedOperations
from .links import Links, share_memory
from .operation import BasicOperation, FusibleOperation, OperationContext
from .pass_operation import PassOperation, has_pass
from .shard_places import places_of_shards
from .user_results import backward_results, check_gradients, forward_results


def create_contexts(count: int, first_with_backward: int, x: Tensor) -> list[OperationContext]:
    """Create the contexts for a call.

    Args:
        count: Operation count.
        first_with_backward: Index of the first operation that the backward pass reaches.
        x: The main input.
    """
    return [
        OperationContext(
            requires_grad=i >= first_with_backward,
            input_requires_grad=i > first_with_backward
            or (i == first_with_backward == 0 and x.requires_grad),
        )
        for i in range(count)
    ]


class ChainRun:
    """A call that runs a chain in segments.

    Args:
        basic_ops: The chain's operations.
        links: Their extra inputs and outputs.
        fusions: The operations after the registered fusion functions.
        parameters: Parameters by operation.
        options: Keyword arguments by operation.
        state: The autocast state.

    Raises:
        NotImplementedError: An operation has a distributed weight.
    """

    def __init__(
        self,
        basic_ops: Sequence[BasicOperation],
        links: Links,
        fusions: FusionResults,
        parameters: Sequence[Sequence[Any]],
        options: Sequence[dict[str, Any]],
        state: AutocastState,
    ) -> None:
        if places_of_shards(basic_ops).groups:
            raise NotImplementedError(
                "distributed weights in a chain that does not run as one pass, such as one under torch.compile, with "
                "operations of a user, or in a checkpoint with delayed scaling; use layers such as te.Linear"
            )
        self.basic_ops, self.links = basic_ops, links
        self.forward_ops, self.backward_ops = fusions.forward, fusions.backward
        self.first_with_backward = fusions.first_with_backward
        self.parameter_shapes: list[list[torch.Size]] = [
            [tensor.shape for tensor in group] for group in parameters
        ]
        self.options, self.state = options, state
        self.contexts: list[OperationContext] = []
        # {operation index: user's fused operation that replaces it in the backward pass}
        self._own_backward = {
            i: op
            for op, indices in self.backward_ops
            if op.is_fused_op and not has_pass(op, "backward")
            for i in indices
        }
        self.override = getattr(state.recipe, "backward_override", None) if state.enabled else None

    def forward(
        self, x: Tensor, extra_inputs: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], list[Any]]:
        """Return (main output, extra outputs for the caller..), and the tensors to save."""
        count = len(self.basic_ops)
        self.contexts = create_contexts(count, self.first_with_backward, x)
        records = torch.is_grad_enabled() or self.first_with_backward < count
        extras = self.links.by_operation(extra_inputs)
        outputs: list[tuple[Any, ...]] = [()] * count
        ops_of_passes = _with_basic_operations(self.forward_ops, lambda op: has_pass(op, "forward"))
        with_passes = {
            i for op, indices in ops_of_passes if has_pass(op, "forward") for i in indices
        }

        def joins(before: Sequence[int], after: Sequence[int]) -> bool:
            return with_passes.issuperset((before[-1], after[0])) and not self.links.connects(
                before, after
            )

        for segment in _segments(ops_of_passes, joins):
            indices = [i for _, members in segment for i in members]
            received = self.links.with_channels(extras, outputs, indices)
            ops = [self.basic_ops[i] for i in indices]
            ctxs, options = [self.contexts[i] for i in indices], [self.options[i] for i in indices]
            if indices[0] in with_passes:
                x, extra_outputs = run_forward(ops, ctxs, x, received, options, records)
            else:
                op, given_x = segment[0][0], x
                x, extra_outputs = self._run_own_method(op, indices, x, received, options)
                self._save_missing_state(op, indices, given_x, received, options)
            for i, extra in zip(indices, extra_outputs, strict=True):
                outputs[i] = tuple(extra)
                self.links.check_outputs(i, outputs[i])
        saved: list[Any] = []
        for ctx in self.contexts:
            tensors = ctx.to_save or ()
            if not hasattr(ctx, "pass_state"):  # saved by a user's operation
                tensors = copy_in_traces(tensors)
            ctx._saved_range = (len(saved), len(saved) + len(tensors))
            ctx.to_save = None
            saved += tensors
        public = [outputs[slot.op][slot.index] for slot in self.links.public_outputs]
        return (*[_return_result(value) for value in (x, *public)],), saved

    def _run_own_method(
        self,
        op: FusibleOperation,
        indices: list[int],
        x: Tensor,
        received: list[Any],
        options: list[Any],
    ) -> tuple[Any, list[Any]]:
        """Run an operation that a user wrote by its own method."""
        before, after = indices[0] - 1, indices[-1] + 1
        previous = self.basic_ops[before] if before >= 0 and self.override is None else None
        following_op = self.basic_ops[after] if after < len(self.basic_ops) else None
        tensors = [
            x,
            *[tensor for basic in op.basic_operations() for tensor in basic.own_tensors()],
            *[tensor for extra in received for tensor in extra],
        ]
        _keep_storage(tensors)
        for i, extra in zip(indices, received, strict=True):
            of_input = tuple(x.shape) if i == indices[0] else None
            self.contexts[i]._input_shapes = (
                of_input,
                *[None if y is None else tuple(y.shape) for y in extra],
            )
        returned = op.fuser_forward(
            [self.contexts[i] for i in indices],
            x,
            basic_op_extra_inputs=[tuple(tensors) for tensors in received],
            prev_op_grad_output_quantizer=None
            if previous is None
            else previous.get_grad_output_quantizer(),
            next_op_input_quantizer=None
            if following_op is None
            else following_op.get_input_quantizer(),
            basic_op_kwargs=options,
        )
        output, extra_outputs = forward_results(op, [self.basic_ops[i] for i in indices], returned)
        _keep_storage([output, *[tensor for tensors in extra_outputs for tensor in tensors]])
        return output, extra_outputs

    def _save_missing_state(
        self,
        op: FusibleOperation,
        indices: list[int],
        x: Tensor,
        received: list[Any],
        options: list[Any],
    ) -> None:
        """Run this package's forward passes after a user's fused one, to save what the backward passes read.

        A user's forward pass may save what it likes, but this package's backward passes read what its own forward
        passes save. They run right after the user's, and their output is discarded.

        Raises:
            RuntimeError: Our passes would not repeat the user's forward pass.
        """
        lacking = [i for i in indices if self._lacks_state(op, i)]
        if not lacking:
            return
        members = [self.basic_ops[i] for i in indices]
        for member in members:
            drops = member.training and getattr(member, "dropout_probability", 0.0) > 0.0
            if not drops and isinstance(member, PassOperation):
                continue
            if self._own_backward.keys() >= set(lacking):
                return  # the backward pass of a user may read no state
            raise RuntimeError(
                f"{type(op).__name__} saved no state for the backward pass of "
                f"{type(self.basic_ops[lacking[0]]).__name__}, and {type(member).__name__} cannot run again to "
                "save it; call fuser_forward of the basic operations with their contexts, or implement "
                "fuser_backward and register the fusion with register_forward_backward_fusion"
            )
        scratch = [
            OperationContext(
                None, None, self.contexts[i].requires_grad, self.contexts[i].input_requires_grad
            )
            for i in indices
        ]
        run_forward(members, scratch, x, received, options, True)
        for i, ctx in zip(indices, scratch, strict=True):
            if i in lacking:
                self.contexts[i].to_save = ctx.to_save
                self.contexts[i].pass_state = ctx.pass_state  # pyright: ignore[reportAttributeAccessIssue]

    def _lacks_state(self, op: FusibleOperation, i: int) -> bool:
        """Whether a basic operation's backward pass may read state that a user's forward pass `op` did not save.

        A fused operation with both passes saves what it reads. One with a backward pass alone may
        call `fuser_backward` on its basic operations.
        """
        ctx = self.contexts[i]
        if (
            not ctx.requires_grad
            or hasattr(ctx, "pass_state")
            or not has_pass(self.basic_ops[i], "backward")
        ):
            return False
        reader = self._own_backward.get(i)
        return reader is None or (reader is not op and ctx.to_save is None)

    def backward(
        self, saved: Sequence[Any], grad_output: Any, grad_extra: Sequence[Any]
    ) -> tuple[Any, list[Any], list[Any]]:
        """Return the gradients for the main input, for all parameters, and for the caller's extra inputs."""
        count = len(self.basic_ops)
        contexts = _restore_contexts(self.contexts, saved)
        del saved  # the contexts own the tensors from here on
        parameters: list[tuple[Any, ...]] = [
            (None,) * len(shapes) for shapes in self.parameter_shapes
        ]
        extra_inputs: list[tuple[Any, ...]] = [
            (None,) * op.num_extra_inputs for op in self.basic_ops
        ]
        by_slot = dict(zip(self.links.public_outputs, grad_extra, strict=True))
        dy: Any = grad_output
        parts = _with_basic_operations(self.backward_ops, self._backward_of_passes)
        reached = [entry for entry in parts if entry[1][-1] >= self.first_with_backward]

        def joins(before: Sequence[int], after: Sequence[int]) -> bool:
            runs_passes = self._runs_passes(before) and self._runs_passes(after)
            return runs_passes and not self.links.connects(before, after)

        for segment in reversed(_segments(reached, joins)):
            indices = [i for _, members in segment for i in members]
            ctxs = [contexts[i] for i in indices]
            grads = [self.links.gradients_of_outputs(i, by_slot, extra_inputs) for i in indices]
            if self._runs_passes(indices):
                dy, parameter_grads, extra = run_backward(ctxs, dy, grads)
            else:
                op = segment[0][0]
                returned = op.fuser_backward(ctxs, dy, basic_op_grad_extra_outputs=grads)
                members = [self.basic_ops[i] for i in indices]
                dy, parameter_grads, extra = backward_results(
                    op, members, returned, indices[0] > self.first_with_backward
                )
                check_gradients(
                    op,
                    (dy, parameter_grads, extra),
                    [ctx._input_shapes for ctx in ctxs],
                    [self.parameter_shapes[i] for i in indices],
                    is_first=indices[0] == 0,
                )
            for i, of_parameters, of_inputs in zip(indices, parameter_grads, extra, strict=True):
                parameters[i], extra_inputs[i] = (
                    tuple(of_parameters),
                    tuple(map(_return_result, of_inputs)),
                )
                expected_count = len(self.parameter_shapes[i])
                if len(parameters[i]) != expected_count:
                    raise RuntimeError(
                        f"the backward pass of {type(self.basic_ops[i]).__name__} returned {len(parameters[i])} "
                        f"parameter gradients for {expected_count} parameters; return one for each parameter, None "
                        "where there is none"
                    )
                contexts[i].saved_tensors = None
        if count and self.first_with_backward > 0:
            dy = None
        flat = [grad for group in parameters for grad in group]
        of_inputs = [extra_inputs[slot.op][slot.index] for slot in self.links.public_inputs]
        return _return_result(dy), flat, of_inputs

    def _backward_of_passes(self, op: FusibleOperation) -> bool:
        """Whether an operation's backward pass and the forward passes before it are this package's."""
        members = [
            i
            for i, basic in enumerate(self.basic_ops)
            if basic in op.basic_operations() and i >= self.first_with_backward
        ]
        return has_pass(op, "backward") and self._have_states(members)

    def _have_states(self, indices: Sequence[int]) -> bool:
        return all(hasattr(self.contexts[i], "pass_state") for i in indices)

    def _runs_passes(self, indices: Sequence[int]) -> bool:
        """Whether single operations run by their passes in the backward pass."""
        have_passes = all(has_pass(self.basic_ops[i], "backward") for i in indices)
        return (
            have_passes
            and self._have_states(indices)
            and not self._own_backward.keys() & set(indices)
        )


def _with_basic_operations(
    ops: IndexedOperations, runs_passes: Callable[[FusibleOperation], bool]
) -> IndexedOperations:
    """Replace fused operations with passes by their basic operations, which kernels compute together."""
    results: IndexedOperations = []
    for op, indices in ops:
        if op.is_fused_op and runs_passes(op):
            results += [
                (basic, [i]) for basic, i in zip(op.basic_operations(), indices, strict=True)
            ]
        else:
            results.append((op, indices))
    return results


def _segments(
    ops: IndexedOperations, joins: Callable[[Sequence[int], Sequence[int]], bool]
) -> list[IndexedOperations]:
    """Cut a chain into segments; joins(before, behind) tells whether two neighbors belong to one segment."""
    segments: list[IndexedOperations] = []
    for op, indices in ops:
        before = [i for _, members in segments[-1] for i in members] if segments else []
        if before and joins(before, indices):
            segments[-1].append((op, indices))
        else:
            segments.append([(op, indices)])
    return segments


def _restore_contexts(
    contexts: Sequence[OperationContext], saved: Sequence[Any]
) -> list[OperationContext]:
    """Return contexts for one backward pass, each with the tensors that it saved."""
    restored: list[OperationContext] = []
    for ctx in contexts:
        begin, end = ctx._saved_range or (0, 0)
        made = ctx
        if torch.compiler.is_compiling():  # a graph may write no object from its forward pass
            made = OperationContext(None, None, ctx.requires_grad, ctx.input_requires_grad)
            if hasattr(ctx, "pass_state"):
                made.pass_state = ctx.pass_state  # pyright: ignore[reportAttributeAccessIssue]
        made.saved_tensors = tuple(saved[begin:end])
        restored.append(made)
    return restored


def _return_result(value: Any) -> Any:
    """Return a chain's result: in a compiled graph, which cannot return a quantized storage, its values."""
    if torch.compiler.is_compiling() and isinstance(value, QuantizedTensorStorage):
        return value.dequantize()
    return value


def _keep_storage(tensors: Sequence[Any]) -> None:
    """Mark tensors whose memory an operation must not free after use."""
    if torch.compiler.is_compiling():
        return
    for tensor in tensors:
        if isinstance(tensor, (Tensor, QuantizedTensorStorage)):
            tensor._do_not_clear = True  # pyright: ignore[reportAttributeAccessIssue]


# A graph that torch 2.11 compiles loses gradients of results that share memory, even as different views.
# Therefore each of several results is cloned.
_CLONES_SHARED_RESULTS = TorchVersion(torch.__version__) < "2.13"


class SegmentedChain(Function):
    KEEPS_AUTOCAST = True  # user operations; `chain.py` turns it off for the package's own passes

    @staticmethod
    def forward(ctx, x, call, *tensors):
        count = sum(map(len, call.parameter_shapes))
        results, saved = call.forward(x, tensors[count:])
        save_tensors(ctx, saved)
        ctx.call = call
        ctx.scale_update = scale_update(call.basic_ops, call.state)
        outputs = distinct(results, (x, *tensors))
        constant = sum(slot.op < call.first_with_backward for slot in call.links.public_outputs)
        ctx.mark_non_differentiable(
            *[y for i, y in enumerate(outputs) if 0 < i <= constant or not y.is_floating_point()]
        )
        ctx.set_materialize_grads(torch.compiler.is_compiling())
        ctx.output = (outputs[0].shape, outputs[0].dtype, outputs[0].device)
        return outputs

    @staticmethod
    @once_differentiable("Sequential")
    def backward(ctx, grad_output, *grad_extra):
        call: ChainRun = ctx.call
        if grad_output is None:  # only extra outputs were used
            shape, dtype, device = ctx.output
            grad_output = torch.zeros(shape, dtype=dtype, device=device)
        gradients = grad_output, *grad_extra
        grad_input, parameters, extra = call.backward(take_saved(ctx), grad_output, grad_extra)
        update: ScaleUpdate | None = ctx.scale_update
        if update is not None:
            update.run()
        grad_input, *extra = clone_shared_quantized([grad_input, *extra], gradients)
        return grad_input, None, *parameters, *extra


def run_segments(
    call: ChainRun, x: Tensor, parameters: Sequence[Sequence[Any]], extra_inputs: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Run a chain in segments, as an autograd function if a backward pass reaches it.

    Args:
        call: The call.
        x: The main input.
        parameters: Parameters by operation.
        extra_inputs: The caller's extra inputs.

    Returns:
        (main output, *extra outputs for the caller).
    """
    for op, indices in call.forward_ops:
        op.pre_fuser_forward(requires_grad=indices[-1] >= call.first_with_backward)
    flat = [parameter for group in parameters for parameter in group]
    if call.first_with_backward == len(call.basic_ops):
        check_transforms(SegmentedChain.OPERATION, x, flat, extra_inputs)
        return call.forward(x, extra_inputs)[0]
    x, *tensors = distinct_while_tracing((x, *flat, *extra_inputs))
    return SegmentedChain.apply(x, call, *tensors)


def clone_shared_quantized(results: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
    """Clone quantized results that occur twice, or that are themselves incoming gradients.

    Autograd keeps the codes of a leaf's gradient only if nothing else refers to the tensor;
    otherwise it copies the values, rounded to the dtype of the leaf.
    """
    owned: list[Any] = []
    for result in results:
        if isinstance(result, QuantizedTensor) and any(
            result is other for other in (*gradients, *owned)
        ):
            result = result.clone()
        owned.append(result)
    return owned


def distinct(results: Sequence[Tensor], inputs: Sequence[Any]) -> tuple[Tensor, ...]:
    """Return results that are different objects, and no input, for autograd to attach its history to.

    A result that shares memory with an input or another result is a view. Autograd therefore raises an error if the
    caller writes to it in place, which would change the other tensor without its gradient.
    """
    if torch.compiler.is_compiling():
        if _CLONES_SHARED_RESULTS and len(results) > 1:
            return tuple([result.clone() for result in results])
        unique: list[Tensor] = []
        for result in results:
            for earlier in (*inputs, *unique):
                if result is earlier:
                    result = result.clone() if _CLONES_SHARED_RESULTS else result.detach()
                    break
            unique.append(result)
        return tuple(unique)
    shared = [
        any(result is other for other in inputs)
        or any(i != j and share_memory(result, other) for j, other in enumerate(results))
        for i, result in enumerate(results)
    ]
    return tuple(
        [
            # A quantized tensor has no view of the same class.
            result
            if not alias
            else result.view_as(result)
            if type(result) is Tensor
            else result.detach()
            for result, alias in zip(results, shared, strict=True)
        ]
    )
