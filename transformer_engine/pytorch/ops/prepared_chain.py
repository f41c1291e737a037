"""PreparedChain: the passes of a whole chain for one kind of call, and their autograd function.

A chain of operations of this package runs as one forward and one backward pass. Everything about these passes that does
not depend on tensor values is prepared once per key of a call (`OperationFuser`): specs, quantizers, dtypes. On a GPU
warm calls run the compiled passes of `fast/compiled.py`. Other chains go through `chain_run.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..distributed_weight import whole_weights
from ..fast.compiled import CompiledLayer, compiles_on
from ..functions.layer import compiled_passes
from ..functions.saving import keep, take_saved_before_transfer
from ..functions.scale_update import update_at_end_of_pass
from ..runtime.autograd import Function, check_transforms
from ..runtime.double_backward import once_differentiable
from ..tensor.quantized_tensor import QuantizedTensorStorage
from .chain import backward, forward, pack_saved, unpack_saved
from .chain_run import Fused, distinct, own_quantized
from .passes.contract import Given, OperationPasses
from .shard_places import ShardPlaces


class Fusions(NamedTuple):
    """The operations of both passes, as clients inspect them; the class of the recipe, and the key of the fusion."""

    forward: Fused
    backward: Fused
    recipe_type: Any
    key: Any


class TensorCounts(NamedTuple):
    """Numbers of tensors of one operation in a call: parameters, extra inputs and extra outputs."""

    parameters: int
    extra_inputs: int
    extra_outputs: int


class PreparedChain:
    """The passes of a chain for one key.

    Args:
        passes: The passes of each operation.
        counts: Numbers of tensors of each operation.
        first: Index of the first operation that the backward pass reaches.
        updates_scales: The backward pass ends with an update of delayed-scaling states.
        device: Device of the tensors.
        fuses: Kernels may compute several operations.

    Attributes:
        fusions: The operations that the fuser shows after a call.
        checks: Functions that check parameters before every call.
        shards: Places of distributed weights among the tensors of a call.
    """

    __slots__ = (
        "_binds",
        "checks",
        "compiled",
        "counts",
        "first",
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
        first: int,
        updates_scales: bool,
        device: torch.device,
        fuses: bool,
    ) -> None:
        self.passes, self.counts, self.first = passes, counts, first
        self.updates_scales, self.fuses = updates_scales, fuses
        self.outputs = 1 + sum([count.extra_outputs for count in counts])
        self.fusions = Fusions([], [], None, None)
        self.checks: tuple[Callable[[], None], ...] = ()
        self.shards = ShardPlaces()
        self.compiled = self._compiled(device) if compiles_on(device) else None
        self._binds = any(type(own).bound is not OperationPasses.bound for own in passes)

    def _compiled(self, device: torch.device) -> CompiledLayer | None:
        """Compiled passes; None if the passes do more than start kernels, products and collectives."""
        specs = [spec for own in self.passes for spec in own.linears()]
        if any(spec.traced for spec in specs) or not all(own.listed for own in self.passes):
            return None
        return compiled_passes(specs, device, _forward_pass, _backward_pass)

    def given(self, tensors: Sequence[Any]) -> list[Given]:
        """Parameters and extra inputs of each operation among the tensors behind the main input."""
        found: list[Given] = []
        at = 1
        for parameters, extra, _ in self.counts:
            between = at + parameters
            found.append(Given(tensors[at:between], tensors[between : between + extra]))
            at = between + extra
        return found

    def __call__(self, given: list[Any]) -> Any:
        """Run the chain.

        Args:
            given: The main input, then the parameters and the extra inputs of each operation.

        Returns:
            The main output, or a tuple of the main output and the extra outputs.
        """
        if self.shards.groups:
            given = list(given)
            shards = [[given[place] for place in places] for places in self.shards.groups]
            with whole_weights(shards, self.shards.fused, None) as wholes:
                for place, whole in zip(itertools.chain(*self.shards.groups), wholes, strict=True):
                    given[place] = whole
                return self._results(given)
        return self._results(given)

    def _results(self, given: list[Any]) -> Any:
        """Run the chain on whole weights."""
        passes = self.passes
        if self._binds:
            passes = [own.bound(read.extra) for own, read in zip(passes, self.given(given), strict=True)]
        if self.first < len(passes):
            results = _PreparedChain.apply(self, passes, *given)
            return results if self.outputs > 1 else results[0]
        check_transforms(_PreparedChain.OPERATION, given)
        if self.compiled is None:
            results = _forward_pass(given, self, passes)[0]
        else:
            results = self.compiled.forward(given, self)[0]
        return results if self.outputs > 1 else results[0]


def _forward_pass(
    tensors: list[Any], chain: PreparedChain, passes: list[OperationPasses] | None = None
) -> tuple[tuple[Any, ...], Any]:
    """The outputs and the tensors to save; and the non-tensor parts of the saved values."""
    given, x = chain.given(tensors), tensors[0]
    tensors.clear()
    results, saved = forward(chain.passes if passes is None else passes, x, given, chain.fuses)
    outputs = (results.output, *itertools.chain(*results.extra))
    if chain.first == len(chain.passes):
        return outputs, ([], {}, ())
    saved[: chain.first] = [()] * chain.first
    parts, forms, shapes = pack_saved(list(itertools.chain(*saved)))
    return (*outputs, *parts), (forms, shapes, tuple(map(len, saved)))


def _backward_pass(tensors: list[Any], chain: PreparedChain, ctx: Any) -> tuple[tuple[Any, ...], None]:
    """Gradients of the forward pass' inputs from the gradients of its outputs and the saved tensors."""
    forms, shapes, lengths = ctx.forms
    gradients = tensors[: chain.outputs]
    values = iter(unpack_saved(tensors[chain.outputs :], forms, shapes))
    tensors.clear()
    saved: list[Sequence[Any]] = [[next(values) for _ in range(length)] for length in lengths[chain.first :]]
    of_outputs = iter(gradients[1:])
    grads = [tuple([next(of_outputs) for _ in range(count.extra_outputs)]) for count in chain.counts]
    quantized = [grad for grad in gradients if isinstance(grad, QuantizedTensorStorage)]
    dy = [gradients[0]]
    del gradients, values, of_outputs
    grad_input, parameters, extra = backward(
        ctx.passes[chain.first :], dy, saved, grads[chain.first :], chain.fuses
    )
    results: list[Any] = [None if chain.first else grad_input]
    for i, count in enumerate(chain.counts):
        if i < chain.first:
            results += [None] * (count.parameters + count.extra_inputs)
            continue
        of_parameters, of_inputs = parameters[i - chain.first], extra[i - chain.first]
        results += [*of_parameters, *of_inputs, *[None] * (count.extra_inputs - len(of_inputs))]
    if quantized or any(isinstance(result, QuantizedTensorStorage) for result in results):
        results = own_quantized(results, quantized)
    return tuple(results), None


class _PreparedChain(Function):
    @staticmethod
    def forward(ctx: Any, chain: PreparedChain, passes: list[OperationPasses], *tensors: Any) -> Any:
        ctx.chain, ctx.passes = chain, passes
        ctx.scale_update = update_at_end_of_pass() if chain.updates_scales else None
        if chain.compiled is None:
            made, ctx.forms = _forward_pass([*tensors], chain, passes)
        else:
            made, kind = chain.compiled.forward([*tensors], chain)
            chain.compiled.record(ctx, kind)
        keep(ctx, made[chain.outputs :])
        outputs = distinct(made[: chain.outputs], tensors)
        constant = [y for y in outputs if not y.is_floating_point()]
        if constant:
            ctx.mark_non_differentiable(*constant)
        ctx.set_materialize_grads(False)
        y = outputs[0]
        ctx.output = y.shape, y.dtype, y.device
        return outputs

    @staticmethod
    @once_differentiable("Sequential")
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        chain: PreparedChain = ctx.chain
        if grads[0] is None:  # only extra outputs were used
            shape, dtype, device = ctx.output
            grads = (torch.zeros(shape, dtype=dtype, device=device), *grads[1:])
        given = [*grads, *take_saved_before_transfer(ctx)]  # both calls empty this list
        if chain.compiled is None:
            results = _backward_pass(given, chain, ctx)[0]
        else:
            results = chain.compiled.backward(ctx, given, len(grads), chain)
        if ctx.scale_update is not None:
            ctx.scale_update.run()
        return None, None, *results
