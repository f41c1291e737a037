"""LayerPasses: the schedules of a layer's passes, built from plain flags.

The flags are constants of Python, because a tracing compiler calls `layer_passes` for real and takes its result as a
constant. Which rules may merge steps follows from the quantizers and is part of the flags.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...common.memory import Memory
from ...common.passes.groups import over_groups, saving_trained_groups
from ...common.passes.linear import LinearFacts, linear_passes
from ...common.passes.norm_linear import NormFacts, norm_linear_passes, norm_mlp_passes
from ...common.passes.rules import (
    ACTIVATION_GRADIENT_IN_PRODUCT,
    ACTIVATION_IN_PRODUCT,
    BIAS_IN_PRODUCT,
    CODES_AND_SUMS_FROM_PRODUCER,
    CODES_FROM_PRODUCER,
    CODES_WITH_SUMS,
    GATHERED_PRODUCT,
    QUANTIZED_PRODUCT,
    SCATTERED_PRODUCT,
    Rule,
    fuse,
)
from ...common.passes.schedule import needed_for, overlap
from ...common.passes.step import Pass, Step
from ...common.passes.vocabulary import Activation, CastSettings, ColumnSum, Product
from ..runtime.tracing import constant_while_tracing
from .linear_spec import LINEAR, LinearSpec, gradient_cast, sums_over_ranks
from .run import Schedule, schedule_of


class LayerPasses(NamedTuple):
    """The schedules of a layer.

    Attributes:
        forward: The forward pass; it saves the buffers that the backward pass reads.
        inference: The forward pass without saving.
        backward: Takes the output gradients and the saved buffers.
        again: The part of the forward pass that makes the saved buffers, for recomputation.
        passes: The forward and the backward pass themselves, for reports.
    """

    forward: Schedule
    inference: Schedule
    backward: Schedule
    again: Schedule
    passes: tuple[Pass, Pass]


def fusion(rule: Rule, layer: str, tensor: str = "") -> str:
    """Return the name by which a merge for a linear layer, or for one of its tensors, is allowed."""
    return f"{rule.name}: {layer}.{tensor}"


def linear_facts(spec: LinearSpec, layer: str = LINEAR, bias: bool = False) -> LinearFacts:
    """Return the facts of a linear layer that decide its steps."""
    parallel = spec.parallel
    return LinearFacts(
        layer,
        bias,
        parallel.mode if spec.communicates and parallel.size > 1 else None,
        spec.needs_grad_input,
        spec.needs_grad_weight,
        spec.backward,
        spec.needs_grad_bias,
        spec.plain,
        spec.keep_input,
        parallel.sequence,
        spec.output is not None,
        spec.grad_input is not None,
        spec.gather_input,
        spec.gather_gradient,
        () if spec.inspector is None else spec.inspector.results,
        parallel.overlap.gather and not spec.traced,
        parallel.overlap.scatter and not spec.traced,
    )


def linear_fusions(spec: LinearSpec, layer: str) -> tuple[str, ...]:
    """Return the merges that the quantizers of a linear layer allow in its own steps."""
    if spec.traced:
        return ()
    allowed: tuple[str, ...] = ()
    if spec.needs_grad_bias and gradient_cast(spec) is not None:
        allowed += (fusion(CODES_WITH_SUMS, layer),)
    for tensor, mode in (("output", "row"), ("grad_input", "column")):
        quantizer = getattr(spec, tensor)
        if quantizer is None or sums_over_ranks(spec.parallel, mode):
            continue
        # A product quantizes its own result in FP8 with a scale that does not depend on the result.
        cast = quantizer.cast(True, False)
        if cast is not None and cast.multiplier is not None:
            allowed += (fusion(QUANTIZED_PRODUCT, layer, tensor),)
    return allowed


@constant_while_tracing
def layer_passes(
    kind: str,
    linears: tuple[LinearFacts, ...],
    allowed: tuple[str, ...],
    norm: tuple[bool, ...] = (),
    activation: str = "",
) -> LayerPasses:
    """Return the schedules of a layer, built at the first call with these arguments.

    Args:
        kind: "linear", "grouped", "norm_linear" or "norm_mlp".
        linears: Facts of each linear layer.
        allowed: Enabled merges, by `fusion`.
        norm: Fields of `NormFacts` of a layer with a norm.
        activation: Name of the activation of a layer with one.
    """
    return _known[kind, linears, allowed, norm, activation]


def _built(key: tuple[Any, ...]) -> LayerPasses:
    kind, facts, allowed, norm, activation = key
    if kind in ("linear", "grouped"):
        made = linear_passes(facts[0])
    elif kind == "norm_linear":
        made = norm_linear_passes(NormFacts(*norm), facts[0])
    else:
        made = norm_mlp_passes(NormFacts(*norm), facts[0], facts[1], activation)

    def is_allowed(rule: str, producer: Step, reader: Step) -> bool:
        return rule in _ALWAYS or f"{rule}: {_merged_for(rule, producer, reader)}" in allowed

    forward, backward = (overlap(fuse(pass_, is_allowed)) for pass_ in made)
    if kind == "grouped":
        layer = facts[0].layer
        forward = saving_trained_groups(over_groups(forward, (layer,)), layer)
        backward = over_groups(backward, (layer,))
    inference = needed_for(forward, forward.results, ())
    again = needed_for(forward, (), forward.saved)
    return LayerPasses(
        schedule_of(forward),
        schedule_of(inference),
        schedule_of(backward),
        schedule_of(again),
        (forward, backward),
    )


_ALWAYS = frozenset([rule.name for rule in (BIAS_IN_PRODUCT, GATHERED_PRODUCT, SCATTERED_PRODUCT)])
_known: Memory[tuple[Any, ...], LayerPasses] = Memory(_built, 4096)


def _merged_for(rule: str, producer: Step, reader: Step) -> str:
    """Return the layer, and the tensor, for which a rule merges two steps."""
    settings = [producer.settings, reader.settings]
    if rule == CODES_AND_SUMS_FROM_PRODUCER.name:
        (sums,) = [s for s in settings if isinstance(s, ColumnSum)]
        return f"{sums.layer}.grad_output"
    casts = [s for s in settings if isinstance(s, CastSettings)]
    if rule == CODES_WITH_SUMS.name:
        return f"{casts[0].layer}."
    if rule in (CODES_FROM_PRODUCER.name, QUANTIZED_PRODUCT.name):
        return f"{casts[0].layer}.{casts[0].tensor}"
    if rule in (ACTIVATION_IN_PRODUCT.name, ACTIVATION_GRADIENT_IN_PRODUCT.name):
        (product,) = [s for s in settings if isinstance(s, Product)]
        return f"{product.layer}."
    assert not any(isinstance(s, Activation) for s in settings), rule
    return ""
