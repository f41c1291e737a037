"""PreparedChain: the passes of a whole chain for one call kind, and their autograd function.

A chain of operations of this package runs as one forward and one backward pass. Everything about these passes that
does not depend on tensor values is prepared once per call key (`call_key.py`): specs, quantizers, dtypes. On a
GPU warm calls run the compiled passes in `fast/compiled.py`. Other chains go through `chain_run.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..distributed_weight import whole_weights
from ..fast.compiled import CompiledLayer, compiles_on
from ..functions.layer import compiled_passes
from ..functions.saving import pack, save_tensors, take_saved, unpack
from ..functions.scale_update import update_at_end_of_pass
from ..runtime.autograd import Function, check_transforms
from ..runtime.double_backward import once_differentiable
from ..tensor.quantized_tensor import QuantizedTensorStorage
from .chain import backward, build_passes, forward, fusion_enabled
from .chain_run import clone_shared_quantized, create_contexts, distinct
from .fusions import FusionResults
from .operation import BasicOperation, FusibleOperation
from .pass_operation import has_pass
from .passes.contract import OperationPasses, OpTensors
from .shard_places import ShardPlaces, places_of_shards


class TensorCounts(NamedTuple):
    """Tensor counts for one operation in a call: parameters, extra inputs and extra outputs."""

    parameters: int
    extra_inputs: int
    extra_outputs: int


class PreparedChain:
    """The passes of a chain for one key.

    Args:
        passes: Passes per operation.
        counts: Tensor counts per operation.
        first_with_backward: Index of the first operation that the backward pass reaches.
        updates_scales: The backward pass ends with an update to delayed-scaling states.
        device: Tensor device.
        fuses: Kernels may compute several operations.
        fusions: The operations that the fuser shows after a call.
        checks: Functions that check parameters in each call: `pre_fuser_forward` of operations that override it.
        shards: Places of distributed weights among the tensors of a call.
    """

    __slots__ = (
        "_binds",
        "checks",
        "compiled",
        "constant_outputs",
        "counts",
        "first_with_backward",
        "fuses",
        "fusions",
        "outputs",
        "passes",
        "shards",
        "updates_scales",
    )

    def __init__(
        self,
        passes: list[OperationPasses],
        counts: tuple[TensorCounts, ...],
        first_with_backward: int,
        updates_scales: bool,
        device: torch.device,
        fuses: bool,
        fusions: FusionResults,
        checks: tuple[Callable[[], None], ...],
        shards: ShardPlaces,
    ) -> None:
        self.passes, self.counts, self.first_with_backward = passes, counts, first_with_backward
        self.updates_scales, self.fuses = updates_scales, fuses
        self.fusions, self.checks, self.shards = fusions, checks, shards
        self.outputs = 1 + sum([count.extra_outputs for count in counts])
        # Number of extra outputs that the backward pass does not reach; they precede the others.
        self.constant_outputs = sum([count.extra_outputs for count in counts[:first_with_backward]])
        self.compiled = self._compiled(device) if compiles_on(device) else None
        self._binds = any(type(entry).bound is not OperationPasses.bound for entry in passes)

    def _compiled(self, device: torch.device) -> CompiledLayer | None:
        """Compiled passes; None if the passes do more than start kernels, products and collectives."""
        specs = [spec for entry in self.passes for spec in entry.linears()]
        if any(spec.traced for spec in specs) or not all(entry.listed for entry in self.passes):
            return None
        return compiled_passes(specs, device, _forward_pass, _backward_pass)

    def tensors_by_operation(self, tensors: Sequence[Any]) -> list[OpTensors]:
        """Parameters and extra inputs per operation among the tensors behind the main input."""
        result: list[OpTensors] = []
        at = 1
        for parameters, extra, _ in self.counts:
            between = at + parameters
            result.append(OpTensors(tensors[at:between], tensors[between : between + extra]))
            at = between + extra
        return result

    def __call__(self, inputs: list[Any], gathered: bool = False) -> Any:
        """Run the chain.

        Args:
            inputs: The main input, then the parameters and the extra inputs per operation.
            gathered: Distributed weights among the inputs are gathered already.

        Returns:
            The main output, or a tuple with the main output and the extra outputs.
        """
        if not gathered:
            for check in self.checks:
                check()
            if self.shards.groups:
                return self._with_gathered_weights(list(inputs))
        passes = self.passes
        if self._binds:
            tensors = self.tensors_by_operation(inputs)
            passes = [
                operation.bound(read.extra) for operation, read in zip(passes, tensors, strict=True)
            ]
        if self.first_with_backward < len(passes):
            results = _PreparedChain.apply(self, passes, *inputs)
            return results if self.outputs > 1 else results[0]
        check_transforms(_PreparedChain.OPERATION, inputs)
        if self.compiled is None:
            results = _forward_pass(inputs, self, passes)[0]
        else:
            results = self.compiled.forward(inputs, self)[0]
        return results if self.outputs > 1 else results[0]

    def _with_gathered_weights(self, inputs: list[Any]) -> Any:
        """Run the chain on the full weights behind distributed ones."""
        shards = [[inputs[position] for position in places] for places in self.shards.groups]
        with whole_weights(shards, self.shards.fused, None) as wholes:
            for position, full in zip(itertools.chain(*self.shards.groups), wholes, strict=True):
                inputs[position] = full
            return self(inputs, gathered=True)


def build_chain(
    basic_ops: Sequence[BasicOperation],
    fusions: FusionResults,
    x: Tensor,
    extra_inputs: Sequence[Sequence[Any]],
    parameters: Sequence[Sequence[Any]],
    updates_scales: bool,
) -> PreparedChain | str:
    """Prepare a chain whose basic operations all have passes.

    Args:
        basic_ops: The basic operations.
        fusions: The operations after the registered fusion functions.
        x: The main input.
        extra_inputs: Extra inputs by operation.
        parameters: Parameters by operation.
        updates_scales: The backward pass ends with an update to delayed-scaling states.

    Returns:
        The chain, or the reason why calls with this key run in segments.
    """
    first_with_backward = fusions.first_with_backward
    for direction, indexed in (("forward", fusions.forward), ("backward", fusions.backward)):
        for op, _ in indexed:
            if not has_pass(op, direction):
                return f"a user wrote the methods of {type(op).__name__}, which a fusion function inserted"
    for op, indices in fusions.forward:
        op.pre_fuser_forward(requires_grad=indices[-1] >= first_with_backward)
    contexts = create_contexts(len(basic_ops), first_with_backward, x)
    options: list[dict[str, Any]] = [{} for _ in basic_ops]
    records = torch.is_grad_enabled()
    passes, read_parameters = build_passes(basic_ops, contexts, x, records, extra_inputs, options)
    for op, read, own in zip(basic_ops, read_parameters, parameters, strict=True):
        # Gradients are returned in the order of `own_tensors`.
        if len(read) != len(own) or any(a is not b for a, b in zip(read, own, strict=True)):
            return f"the passes of {type(op).__name__} read other parameters than its own_tensors returns"
    # Checks that every call repeats, because they depend on more than the key (main_grad).
    checks = [
        partial(op.pre_fuser_forward, requires_grad=i >= first_with_backward)
        for i, op in enumerate(basic_ops)
        if type(op).pre_fuser_forward is not FusibleOperation.pre_fuser_forward
        and getattr(op, "_accumulate_into_main_grad", True)
    ]
    counts = [
        TensorCounts(len(tensors), op.num_extra_inputs, op.num_extra_outputs)
        for op, tensors in zip(basic_ops, parameters, strict=True)
    ]
    return PreparedChain(
        passes,
        tuple(counts),
        first_with_backward,
        updates_scales=updates_scales,
        device=x.device,
        fuses=fusion_enabled(),
        fusions=fusions,
        checks=tuple(checks),
        shards=places_of_shards(basic_ops),
    )


def _forward_pass(
    inputs: list[Any], chain: PreparedChain, passes: list[OperationPasses] | None = None
) -> tuple[tuple[Any, ...], Any]:
    """The outputs and the tensors to save; and the non-tensor parts of the saved values."""
    tensors, x = chain.tensors_by_operation(inputs), inputs[0]
    inputs.clear()
    y, extra, saved = forward(chain.passes if passes is None else passes, x, tensors, chain.fuses)
    outputs = (y, *itertools.chain(*extra))
    start = chain.first_with_backward
    if start == len(chain.passes):
        return outputs, ([], ())
    saved[:start] = [()] * start
    parts, forms = pack(*itertools.chain(*saved))
    return (*outputs, *parts), (forms, tuple(map(len, saved)))


def _backward_pass(
    tensors: list[Any], chain: PreparedChain, ctx: Any
) -> tuple[tuple[Any, ...], None]:
    """Forward-input gradients from the output gradients and the saved tensors."""
    forms, lengths = ctx.forms
    gradients = tensors[: chain.outputs]
    values = iter(unpack(tensors[chain.outputs :], forms))
    tensors.clear()
    start = chain.first_with_backward
    saved: list[Sequence[Any]] = [
        [next(values) for _ in range(length)] for length in lengths[start:]
    ]
    extra_gradients = iter(gradients[1:])
    grads = [
        tuple([next(extra_gradients) for _ in range(count.extra_outputs)]) for count in chain.counts
    ]
    quantized = [grad for grad in gradients if isinstance(grad, QuantizedTensorStorage)]
    dy = [gradients[0]]
    del gradients, values, extra_gradients
    grad_input, parameters, extra = backward(
        ctx.passes[start:], dy, saved, grads[start:], chain.fuses
    )
    results: list[Any] = [None if start else grad_input]
    for i, count in enumerate(chain.counts):
        if i < start:
            results += [None] * (count.parameters + count.extra_inputs)
            continue
        parameter_gradients, input_gradients = parameters[i - start], extra[i - start]
        results += [
            *parameter_gradients,
            *input_gradients,
            *[None] * (count.extra_inputs - len(input_gradients)),
        ]
    if quantized or any(isinstance(result, QuantizedTensorStorage) for result in results):
        results = clone_shared_quantized(results, quantized)
    return tuple(results), None


class _PreparedChain(Function):
    @staticmethod
    def forward(
        ctx: Any, chain: PreparedChain, passes: list[OperationPasses], *tensors: Any
    ) -> Any:
        ctx.chain, ctx.passes = chain, passes
        ctx.scale_update = update_at_end_of_pass() if chain.updates_scales else None
        if chain.compiled is None:
            results, ctx.forms = _forward_pass([*tensors], chain, passes)
        else:
            results, kind = chain.compiled.forward([*tensors], chain)
            chain.compiled.save_kind(ctx, kind)
        save_tensors(ctx, results[chain.outputs :])
        outputs = distinct(results[: chain.outputs], tensors)
        constant = [
            y
            for i, y in enumerate(outputs)
            if 0 < i <= chain.constant_outputs or not y.is_floating_point()
        ]
        if constant:
            ctx.mark_non_differentiable(*constant)
        ctx.set_materialize_grads(False)
        y = outputs[0]
        ctx.output = y.shape, y.dtype, y.device
        return outputs

    @staticmethod
    @once_differentiable("Sequential")
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        chain: PreparedChain = ctx.chain
        if grads[0] is None:  # only extra outputs were used
            shape, dtype, device = ctx.output
            grads = (torch.zeros(shape, dtype=dtype, device=device), *grads[1:])
        inputs = [*grads, *take_saved(ctx, waits=False)]  # both calls empty this list
        if chain.compiled is None:
            results = _backward_pass(inputs, chain, ctx)[0]
        else:
            results = chain.compiled.backward(ctx, inputs, len(grads), chain)
        if ctx.scale_update is not None:
            ctx.scale_update.run()
        return None, None, *results
