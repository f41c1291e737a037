"""PreparedChain: the passes of a whole chain for one kind of call, and their autograd function.

A chain whose operations all contribute steps runs as one forward and one backward pass. Everything about these passes
that does not depend on tensor values is prepared once per key of a call (`OperationFuser`): steps, specs, quantizers,
the layout of saved buffers. On a GPU warm calls run the compiled passes of `fast/compiled.py`. Other chains go
through `chain_run.py`.
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
from ..functions.linear_spec import LinearSpec
from ..functions.run import run
from ..functions.saving import keep, pack, take_saved_before_transfer, unpack
from ..functions.scale_update import update_at_end_of_pass
from ..runtime.autograd import Function, check_transforms
from ..runtime.double_backward import once_differentiable
from ..tensor.quantized_tensor import QuantizedTensorStorage
from .chain import ChainEnvironment, grad_facts
from .chain_plans import BackwardKey, BackwardPlan, ForwardPlan, GradFacts, PassMember, backward_plan
from .chain_run import Fused, ShardPlaces, distinct, own_quantized

# Steps of forward passes whose launches, products and collectives, and those of their backward passes, a compiled pass
# may list.
_LISTED = frozenset(
    {
        "accumulate", "activation", "add", "add_bias", "alias", "all_gather.begin", "all_gather.wait",
        "all_reduce.begin", "all_reduce.wait", "cast", "convert", "dense", "gathered_product", "leading", "norm",
        "product", "reduce_scatter.begin", "reduce_scatter.wait", "rows", "scattered_product", "unflatten", "values",
    }
)  # fmt: skip


class Fusions(NamedTuple):
    """The operations of both passes, as clients inspect them; the class of the recipe, and the key of the fusion."""

    forward: Fused
    backward: Fused
    recipe_type: Any
    key: Any


class PreparedChain:
    """The passes of a chain for one key.

    Args:
        members: The operations.
        parameters: Number of parameters of each operation.
        plan: The forward pass.
        environment: What its steps and those of the backward pass refer to.
        first: Index of the first operation that the backward pass reaches.
        updates_scales: The backward pass ends with an update of delayed-scaling states.
        device: Device of the tensors.
        fused: Rules have merged the steps.

    Attributes:
        fusions: The operations that the fuser shows after a call.
        checks: Functions that check parameters before every call.
        shards: Places of distributed weights among the tensors of a call.
    """

    __slots__ = (
        "_backward_plans",
        "_of_call",
        "checks",
        "compiled",
        "environment",
        "first",
        "fused",
        "fusions",
        "members",
        "outputs",
        "parameters",
        "plan",
        "shards",
        "updates_scales",
    )

    def __init__(
        self,
        members: tuple[PassMember, ...],
        parameters: tuple[int, ...],
        plan: ForwardPlan,
        environment: ChainEnvironment,
        first: int,
        updates_scales: bool,
        device: torch.device,
        fused: bool,
    ) -> None:
        self.members, self.parameters, self.plan = members, parameters, plan
        self.environment, self.first, self.updates_scales = environment, first, updates_scales
        self.fused = fused
        self.outputs = 1 + sum(plan.extra_outputs)
        self.fusions = Fusions([], [], None, None)
        self.checks: tuple[Callable[[], None], ...] = ()
        self.shards = ShardPlaces()
        self._backward_plans: dict[Any, tuple[BackwardPlan, tuple[int, ...], tuple[int, ...]]] = {}
        self.compiled = self._compiled(device) if compiles_on(device) else None
        # Names of operations whose entry in the environment is made in every call, with the place of its tensor.
        self._of_call: list[tuple[str, int]] = []
        place = 1
        for member, count in zip(members, parameters, strict=True):
            place += count
            if member.name in environment.of_call:
                self._of_call.append((member.name, place))
            place += member.extra_inputs

    def _compiled(self, device: torch.device) -> CompiledLayer | None:
        """Return the compiled passes; None if the steps do more than start kernels, products and collectives."""
        if not _LISTED.issuperset([step.op for step in self.plan.steps.steps]):
            return None
        linears: dict[str, Any] = (
            self.environment.linears
        )  # collectives have an entry too, without quantizers
        specs = [spec for spec in linears.values() if isinstance(spec, LinearSpec)]
        if any(spec.traced for spec in specs):
            return None
        return compiled_passes(specs, device, _forward_pass, _backward_pass)

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
        environment = self._environment_of(given) if self._of_call else self.environment
        if self.first < len(self.members):
            results = _PreparedChain.apply(self, environment, *given)
            return results if self.outputs > 1 else results[0]
        check_transforms(_PreparedChain.OPERATION, given)
        if self.compiled is None:
            results = _forward_pass(given, self, environment)[0]
        else:
            results = self.compiled.forward(given, self)[0]
        return results if self.outputs > 1 else results[0]

    def _environment_of(self, given: list[Any]) -> ChainEnvironment:
        """Return the environment of a call, in which some operations depend on values of their extra inputs."""
        whole = self.environment
        linears = dict(whole.linears)
        for name, place in self._of_call:
            linears[name] = whole.of_call[name](given[place])
        return ChainEnvironment(linears, whole.dtypes, whole.norms, whole.activations, whole.objects)

    def backward_of(self, grads: Sequence[Any]) -> tuple[BackwardPlan, tuple[int, ...], tuple[int, ...]]:
        """Return the backward pass for gradients of the outputs, built at the first call of its kind.

        Returns:
            The pass; the places of its inputs among gradients and saved buffers; and for each input of the forward
            pass the place of its gradient among the results, -1 for None.
        """
        dy, *extra = grads
        kind = (isinstance(dy, QuantizedTensorStorage), *[grad_facts(grad) for grad in extra])
        found = self._backward_plans.get(kind)
        if found is None:
            found = self._backward_plans[kind] = self._build_backward(kind)
        return found

    def _build_backward(self, kind: tuple[Any, ...]) -> tuple[BackwardPlan, tuple[int, ...], tuple[int, ...]]:
        quantized, facts = kind[0], iter(kind[1:])
        of_outputs: list[tuple[GradFacts | None, ...]] = [
            tuple([next(facts) for _ in range(count)]) for count in self.plan.extra_outputs
        ]
        reached = range(self.first, len(self.members))
        key = BackwardKey(
            tuple([self.members[i] for i in reached]),
            tuple([self.plan.saved[i] for i in reached]),
            tuple([of_outputs[i] for i in reached]),
            quantized,
        )
        plan = backward_plan(key, self.fused)
        places: dict[str | None, int] = {"dy": 0}
        for i, count in enumerate(self.plan.extra_outputs):
            places.update({f"{self.members[i].name}.grad_extra{n}": len(places) + n for n in range(count)})
        start = self.outputs
        for pairs in self.plan.saved:
            places.update({source: start + n for n, (_, source) in enumerate(pairs)})
            start += len(pairs)
        order = [-1 if self.first else 0]
        parameter, extra_input = 1, 1 + sum(plan.parameters)
        for i, member in enumerate(self.members):
            counts = self.parameters[i], member.extra_inputs
            if i < self.first:
                order += [-1] * sum(counts)
                continue
            assert (plan.parameters[i - self.first], plan.extra_inputs[i - self.first]) in (
                counts,
                (counts[0], 0),
            )
            order += range(parameter, parameter + counts[0])
            parameter += counts[0]
            made = plan.extra_inputs[i - self.first]
            order += [*range(extra_input, extra_input + made), *[-1] * (counts[1] - made)]
            extra_input += made
        return plan, tuple([places[name] for name in plan.steps.inputs]), tuple(order)


def _forward_pass(
    given: list[Any], chain: PreparedChain, environment: ChainEnvironment | None = None
) -> tuple[tuple[Any, ...], Any]:
    """Return the outputs and the tensors to save; and the non-tensor parts of the saved buffers."""
    environment = chain.environment if environment is None else environment
    results, saved = run(chain.plan.schedule, environment, given)  # pyright: ignore[reportArgumentType]
    if not saved:
        return tuple(results), ((), {})
    constants = {i: value for i, value in enumerate(saved) if type(value) in (tuple, torch.Size)}
    tensors, forms = pack(*[None if i in constants else value for i, value in enumerate(saved)])
    return (*results, *tensors), (forms, constants)


def _backward_pass(given: list[Any], chain: PreparedChain, ctx: Any) -> tuple[tuple[Any, ...], None]:
    """Return the gradients of the forward pass' inputs from those of its outputs and the saved tensors."""
    count = chain.outputs
    forms, constants = ctx.forms
    plan, places, order = chain.backward_of(given[:count])
    values = given[:count] + unpack(given[count:], forms)
    given.clear()
    for i, constant in constants.items():
        values[count + i] = constant
    inputs = [values[place] for place in places]
    gradients = values[:count] if plan.quantized else ()
    del values
    results, _ = run(plan.schedule, ctx.environment, inputs)  # pyright: ignore[reportArgumentType]
    if plan.quantized:
        results = own_quantized(results, gradients)
    return tuple([None if place < 0 else results[place] for place in order]), None


class _PreparedChain(Function):
    @staticmethod
    def forward(ctx: Any, chain: PreparedChain, environment: ChainEnvironment, *tensors: Any) -> Any:
        ctx.chain, ctx.environment = chain, environment
        ctx.scale_update = update_at_end_of_pass() if chain.updates_scales else None
        if chain.compiled is None:
            made, ctx.forms = _forward_pass([*tensors], chain, environment)
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
