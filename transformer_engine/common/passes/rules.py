"""Rewrites of passes: each rule merges two steps into one operation that computes both.

A rule is a pure function of two steps, the producer of a buffer and a step that reads it (or two readers of the same
buffer, see `beside`). It returns the merged step, or None where it does not apply. `fuse` applies rules until none
applies any more; the caller's `allowed` decides per rule and pair whether a merge pays, because this depends on
quantizers and kernels. Layers and user-defined sequences of operations share these rules.

A merge never changes the results and the saved buffers of a pass: a buffer disappears only if the merged steps alone
read it and the pass neither returns nor saves it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .step import Pass, Step, replaced
from .vocabulary import (
    Activation,
    CastSettings,
    Collective,
    ColumnSum,
    NormSettings,
    OverlappedProduct,
    Product,
)

Merge = Callable[[Step, Step], "Step | None"]
Allowed = Callable[[str, Step, Step], bool]
# Number of inputs of a product: a and b; with a bias; with the input of GELU; with a total to which it adds.
_OPERANDS, _WITH_BIAS, _WITH_EPILOGUE, _WITH_TOTAL = 2, 3, 4, 5


@dataclass(frozen=True, slots=True)
class Rule:
    """A rewrite of two steps into one.

    Attributes:
        name: Name, by which callers allow a rule and `explain` reports it.
        merge: Returns the merged step of a producer and a reader of its first result (of two readers of one buffer in
            their order, for `beside`), or None.
        keeps: The merged step still makes the producer's first result, which others may read.
        beside: The two steps read the same first input, instead of one reading the other's result.
    """

    name: str
    merge: Merge
    keeps: bool = False
    beside: bool = False


def _codes_from_producer(producer: Step, reader: Step) -> Step | None:
    """Let a norm, an activation or its gradient whose only reader is a cast compute the codes itself."""
    settings: Any = producer.settings
    if reader.op != "cast" or producer.op not in ("norm", "activation", "activation_backward"):
        return None
    if settings.cast is not None:
        return None
    return Step(
        producer.op,
        producer.inputs,
        (*reader.results, *producer.results[1:]),
        replace(settings, cast=reader.settings),
    )


def _codes_and_sums_from_producer(producer: Step, reader: Step) -> Step | None:
    """Let an activation's gradient whose only reader computes its codes and column sums compute both itself."""
    settings, read = producer.settings, reader.settings
    if producer.op != "activation_backward" or reader.op != "column_sum":
        return None
    if not isinstance(settings, Activation) or not isinstance(read, ColumnSum) or read.cast is None:
        return None
    if settings.cast is not None:
        return None
    made = replace(settings, cast=read.cast, sums=read.layer)
    return Step(producer.op, producer.inputs, reader.results, made)


def _codes_with_sums(first: Step, second: Step) -> Step | None:
    """Compute column sums of a matrix and its codes in one step."""
    sums, cast = (first, second) if first.op == "column_sum" else (second, first)
    if sums.op != "column_sum" or cast.op != "cast" or not isinstance(sums.settings, ColumnSum):
        return None
    if sums.settings.cast is not None:
        return None
    settings = replace(sums.settings, cast=cast.settings)
    return Step("column_sum", sums.inputs, (*cast.results, *sums.results), settings)


def _unfused_product(step: Step, inputs: int) -> Product | None:
    """Return the settings of a product without activation or cast that has at most `inputs` inputs; otherwise None."""
    settings = step.settings
    if step.op != "product" or not isinstance(settings, Product) or len(step.inputs) > inputs:
        return None
    return None if settings.activation or settings.cast else settings


def _bias_in_product(producer: Step, reader: Step) -> Step | None:
    """Let a product whose only reader adds a bias add it in its epilogue."""
    settings = _unfused_product(producer, _OPERANDS)
    if settings is None or reader.op != "add_bias" or reader.inputs[0] != producer.results[0]:
        return None
    return Step("product", (*producer.inputs, reader.inputs[1]), reader.results, settings)


def _is_gelu(step: Step, op: str) -> bool:
    """Return whether a step is GELU or its gradient (`op`) in high precision."""
    settings = step.settings
    return (
        step.op == op
        and isinstance(settings, Activation)
        and settings.kind == "gelu"
        and settings.cast is None
    )


def _activation_in_product(producer: Step, reader: Step) -> Step | None:
    """Let a product that GELU reads compute GELU in its epilogue, and keep its own result for other readers."""
    settings = _unfused_product(producer, _WITH_TOTAL)
    if settings is None or not _is_gelu(reader, "activation"):
        return None
    results = (*reader.results, *producer.results)
    return Step("product", producer.inputs, results, replace(settings, activation="gelu"))


def _activation_gradient_in_product(producer: Step, reader: Step) -> Step | None:
    """Multiply an input gradient that only GELU's gradient reads by GELU's derivative in the epilogue."""
    settings = _unfused_product(producer, _OPERANDS)
    if settings is None or not _is_gelu(reader, "activation_backward"):
        return None
    if producer.results[0] != reader.inputs[0]:
        return None
    made = replace(settings, activation="gelu_gradient")
    return Step("product", (*producer.inputs, None, reader.inputs[1]), reader.results[:1], made)


def _quantized_product(producer: Step, reader: Step) -> Step | None:
    """Let a product whose only reader quantizes it compute the codes itself.

    The result of a product that accumulates is the total, which cannot be codes.
    """
    settings = _unfused_product(producer, _WITH_EPILOGUE)
    if settings is None or reader.op != "quantize" or not isinstance(reader.settings, CastSettings):
        return None
    return Step("product", producer.inputs, reader.results, replace(settings, cast=reader.settings))


def _accumulated_product(producer: Step, reader: Step) -> Step | None:
    """Let a product that is added to a total in place accumulate into it."""
    settings = _unfused_product(producer, _OPERANDS)
    if settings is None or reader.op != "accumulate" or reader.inputs[1] != producer.results[0]:
        return None
    return Step("product", (*producer.inputs, None, None, reader.inputs[0]), reader.results, settings)


def _sum_in_norm_backward(producer: Step, reader: Step) -> Step | None:
    """Let the gradient of a norm add a following addend, such as that of a residual connection."""
    if producer.op != "norm_backward" or reader.op != "add" or len(producer.inputs) > 5:
        return None
    other = reader.inputs[1] if reader.inputs[0] == producer.results[0] else reader.inputs[0]
    if not isinstance(producer.settings, NormSettings) or other == producer.results[0]:
        return None
    results = (*reader.results, *producer.results[1:])
    return Step("norm_backward", (*producer.inputs, other), results, producer.settings)


def _gathered_product(producer: Step, reader: Step) -> Step | None:
    """Merge a gather with the product of its rows, so that rows of one rank multiply while others are in transit."""
    settings, gather = _unfused_product(reader, _WITH_BIAS), producer.settings
    if producer.op != "all_gather.wait" or not isinstance(gather, Collective) or not gather.overlaps:
        return None
    if settings is None or settings.turned[0] or reader.inputs[0] != producer.results[0]:
        return None
    results = (*reader.results, *producer.results)
    return Step(
        "gathered_product",
        (*producer.inputs, *reader.inputs[1:]),
        results,
        OverlappedProduct(settings, gather),
    )


def _scattered_product(producer: Step, reader: Step) -> Step | None:
    """Merge a product with the reduce-scatter of its result, so that rows are in transit while others multiply."""
    settings, scatter = _unfused_product(producer, _OPERANDS), reader.settings
    if settings is None or reader.op != "reduce_scatter.begin":
        return None
    if not isinstance(scatter, Collective) or not scatter.overlaps:
        return None
    return Step("scattered_product", producer.inputs, reader.results, OverlappedProduct(settings, scatter))


CODES_FROM_PRODUCER = Rule("codes from producer", _codes_from_producer)
CODES_AND_SUMS_FROM_PRODUCER = Rule("codes and sums from producer", _codes_and_sums_from_producer)
CODES_WITH_SUMS = Rule("codes beside sums", _codes_with_sums, beside=True)
BIAS_IN_PRODUCT = Rule("bias in product", _bias_in_product)
ACTIVATION_IN_PRODUCT = Rule("activation in product", _activation_in_product, keeps=True)
ACTIVATION_GRADIENT_IN_PRODUCT = Rule("activation gradient in product", _activation_gradient_in_product)
QUANTIZED_PRODUCT = Rule("quantized product", _quantized_product)
ACCUMULATED_PRODUCT = Rule("accumulated product", _accumulated_product)
SUM_IN_NORM_BACKWARD = Rule("sum in norm backward", _sum_in_norm_backward)
GATHERED_PRODUCT = Rule("gathered product", _gathered_product, keeps=True)
SCATTERED_PRODUCT = Rule("scattered product", _scattered_product)
RULES = (
    BIAS_IN_PRODUCT,
    CODES_WITH_SUMS,
    CODES_AND_SUMS_FROM_PRODUCER,
    CODES_FROM_PRODUCER,
    ACTIVATION_IN_PRODUCT,
    ACTIVATION_GRADIENT_IN_PRODUCT,
    QUANTIZED_PRODUCT,
    ACCUMULATED_PRODUCT,
    SUM_IN_NORM_BACKWARD,
    GATHERED_PRODUCT,
    SCATTERED_PRODUCT,
)


def fuse(pass_: Pass, allowed: Allowed, rules: Sequence[Rule] = RULES) -> Pass:
    """Apply rules to a pass until none applies.

    Args:
        pass_: The pass.
        allowed: allowed(rule name, producer, reader) is True if the merge is enabled.
        rules: The rules, in order of preference.

    Returns:
        A pass with the same inputs, results and saved buffers.
    """
    while (rewritten := _once(pass_, allowed, rules)) is not None:
        pass_ = rewritten
    return pass_


def _once(pass_: Pass, allowed: Allowed, rules: Sequence[Rule]) -> Pass | None:
    for rule in rules:
        for second, reader in enumerate(pass_.steps):
            for first in _partners(pass_, rule, second):
                producer = pass_.steps[first]
                merged = rule.merge(producer, reader)
                if merged is None or set(merged.reads()) & {*producer.makes(), *reader.makes()}:
                    continue
                if not allowed(rule.name, producer, reader):
                    continue
                rewritten = _merged(pass_, first, second, merged)
                if rewritten is not None:
                    return rewritten
    return None


def _partners(pass_: Pass, rule: Rule, second: int) -> list[int]:
    """Return the earlier steps that a rule may merge with a step."""
    reader = pass_.steps[second]
    if rule.beside:
        shared = reader.inputs[0]
        return [i for i in range(second) if shared is not None and pass_.steps[i].inputs[:1] == (shared,)]
    makers = []
    for name in reader.reads():
        maker = pass_.maker(name)
        if maker is None or pass_.steps[maker].results[0] != name:
            continue
        alone = (
            pass_.readers(name) == (second,) and reader.inputs.count(name) == 1 and name not in pass_.kept()
        )
        if alone or rule.keeps:
            makers.append(maker)
    return makers


def _merged(pass_: Pass, first: int, second: int, step: Step) -> Pass | None:
    """Return the pass with a merged step where the first or the second one was; None where neither place is valid."""
    before = set(pass_.inputs)
    for earlier in pass_.steps[:first]:
        before.update(earlier.makes())
    if before.issuperset(step.reads()):
        return replaced(pass_, first, second, step, at=first)
    made = set(pass_.steps[first].makes())
    between = pass_.steps[first + 1 : second]
    if any(made.intersection(other.reads()) for other in between):
        return None
    return replaced(pass_, first, second, step, at=second)


def without_identity_casts(pass_: Pass, is_identity: Callable[[CastSettings], bool]) -> Pass:
    """Remove casts that leave values unchanged: products read the matrix itself, transposed for a column direction.

    Args:
        pass_: The pass.
        is_identity: Whether the quantizer of a cast leaves values unchanged.

    Returns:
        The pass without such casts. Where a removed result is returned or saved, the matrix itself is.
    """
    aliases: dict[str | None, tuple[str, bool]] = {}
    steps: list[Step] = []
    for step in pass_.steps:
        if step.op == "cast" and isinstance(step.settings, CastSettings) and is_identity(step.settings):
            source = step.inputs[0]
            assert source is not None
            for name, turned in zip(step.results, (False, True), strict=True):
                if name is not None:
                    aliases[name] = (source, turned)
        else:
            steps.append(_reading(step, aliases))
    renamed = [
        tuple([aliases.get(name, (name,))[0] for name in names]) for names in (pass_.results, pass_.saved)
    ]
    return Pass(pass_.inputs, renamed[0], renamed[1], tuple(steps))


def _reading(step: Step, aliases: dict[str | None, tuple[str, bool]]) -> Step:
    """Return the step with aliased inputs replaced; a product then reads the transpose of a column direction."""
    inputs = tuple([aliases.get(name, (name,))[0] for name in step.inputs])
    if inputs == step.inputs:
        return step
    settings = step.settings
    if isinstance(settings, Product):
        turned = [
            turn or (name in aliases and aliases[name][1])
            for name, turn in zip(step.inputs[:2], settings.turned, strict=True)
        ]
        settings = replace(settings, turned=(turned[0], turned[1]))
    return Step(step.op, inputs, step.results, settings)
