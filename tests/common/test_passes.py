"""Passes as data: rules and schedules do not change the result of a pass, for random passes and for layers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_engine.common.passes.linear import LinearFacts, linear_passes
from transformer_engine.common.passes.rules import RULES, fuse, without_identity_casts
from transformer_engine.common.passes.schedule import buffers, freed_after, overlap
from transformer_engine.common.passes.step import Pass, Step
from transformer_engine.common.passes.vocabulary import (
    OPERATIONS,
    Activation,
    CastSettings,
    Collective,
    ColumnSum,
    NormSettings,
    Product,
)

CAST = CastSettings("linear", "input", True, True)
COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter")


def results_of(step: Step, read: list[Any]) -> list[Any]:
    """Return a term for each result of a step. A fused operation has the terms of the steps that it replaces."""
    settings: Any = step.settings
    if step.op == "cast":
        return [(direction, settings, read[0]) for direction in ("rowwise", "columnwise")]
    if step.op == "product":
        return _product(settings, read + [None] * (5 - len(read)))
    if step.op in ("norm", "activation", "activation_backward", "column_sum") and settings.cast is not None:
        plain = {"norm": NormSettings("norm"), "activation": Activation("activation", "gelu")}
        if step.op == "column_sum":
            sums = results_of(Step("column_sum", (), (), ColumnSum(settings.layer)), read)
            return [*results_of(Step("cast", (), (), settings.cast), read), *sums]
        bare = plain.get(step.op, Activation("activation", getattr(settings, "kind", "")))
        if step.op == "activation":
            bare = Activation("activation", settings.kind)
        first, *rest = results_of(Step(step.op, (), (None,) * OPERATIONS[step.op][1], bare), read)
        codes = results_of(Step("cast", (), (), settings.cast), [first])
        if step.op == "activation_backward":
            return [*codes, ("column_sum", ColumnSum(settings.sums or ""), first)]
        return [*codes, *rest]
    if step.op == "norm_backward" and len(read) > 5:
        dx, *rest = results_of(Step("norm_backward", (), (None,) * 3, settings), read[:5])
        return [("add", frozenset([dx, read[5]])), *rest]
    if step.op == "add":
        return [("add", frozenset(read))]
    if step.op == "column_sum":
        return [("column_sum", settings, read[0])]
    if step.op == "accumulate":
        return [("accumulate", *read)]
    if step.op == "gathered_product":
        (whole,) = results_of(Step("all_gather.wait", (), (None,), settings.collective), read[:1])
        return [*_product(settings.product, [whole, *read[1:], *[None] * (4 - len(read[1:]))]), whole]
    if step.op == "scattered_product":
        y = _product(settings.product, [*read, None, None, None])
        return results_of(Step("reduce_scatter.begin", (), (None,), settings.collective), y)
    return [(step.op, settings, i, *read) for i in range(OPERATIONS[step.op][1])]


def _product(settings: Product, read: list[Any]) -> list[Any]:
    a, b, bias, activated, out = read
    y: Any = ("product", settings.layer, settings.kind, settings.turned, a, b)
    if bias is not None:
        y = ("add_bias", None, 0, y, bias)
    if out is not None:
        return [("accumulate", out, y)]
    gelu = Activation("activation", "gelu")
    if settings.activation == "gelu":
        return [("activation", gelu, 0, y), y]
    if settings.activation == "gelu_gradient":
        return [("activation_backward", gelu, 0, y, activated)]
    return [y if settings.cast is None else ("quantize", settings.cast, 0, y)]


def evaluated(pass_: Pass) -> tuple[list[Any], list[Any]]:
    """Return the terms of the returned and of the saved values of a pass."""
    values: dict[str | None, Any] = {name: name for name in pass_.inputs}
    values[None] = None
    for step in pass_.steps:
        made = results_of(step, [values[name] for name in step.inputs])
        values.update(
            (name, term) for name, term in zip(step.results, made, strict=False) if name is not None
        )
    return [values[name] for name in pass_.results], [values[name] for name in pass_.saved]


SETTINGS: dict[str, Any] = {
    "cast": CAST,
    "quantize": CastSettings("linear", "output", True, False),
    "product": Product("linear", "forward"),
    "norm": NormSettings("norm"),
    "norm_backward": NormSettings("norm"),
    "activation_backward": Activation("activation", "gelu"),
    "column_sum": ColumnSum("linear"),
}
READS = {"product": 2, "norm_backward": 5}


def passes() -> st.SearchStrategy[Pass]:
    """Return a strategy of passes. Drawing bytes is ten times as fast as drawing each operation and input."""
    return st.binary(min_size=192, max_size=192).map(pass_of)


def pass_of(choices: bytes) -> Pass:
    """Return a pass of random operations, each on earlier buffers, that returns and saves some of them."""
    names = ["x0", "x1", "x2"]
    steps: list[Step] = []
    counter, left = itertools.count(), iter(choices)
    operations = ["cast", "quantize", "product", "norm", "norm_backward", "activation", "activation_backward"]
    operations += ["column_sum", "add", "add_bias", "accumulate", "all_reduce"]

    def pick(options: Sequence[str]) -> str:
        return options[next(left, 0) % len(options)]

    def earlier() -> str:
        # The latest buffers are read most often, so that chains arise.
        return pick(names[-2:] if next(left, 0) % 2 else names)

    def kept() -> tuple[str, ...]:
        return tuple([pick(names) for _ in range(1 + next(left, 0) % 4)])

    for _ in range(1 + next(left, 0) % 14):
        op = pick(operations)
        if op == "all_reduce":
            pending, result = f"p{next(counter)}", f"r{next(counter)}"
            steps.append(Step("all_reduce.begin", (earlier(),), (pending,), Collective("linear")))
            steps.append(Step("all_reduce.wait", (pending,), (result,), Collective("linear")))
            names.append(result)
            continue
        reads, makes = OPERATIONS[op]
        if op in ("activation_backward", "product"):
            makes = 1
        inputs = tuple([earlier() for _ in range(READS.get(op, reads))])
        results = tuple([f"b{next(counter)}" for _ in range(makes)])
        chosen = SETTINGS.get(op)
        if op == "activation":
            chosen = Activation("activation", pick(("gelu", "relu")))
        steps.append(Step(op, inputs, results, chosen))
        names += results
    return Pass(("x0", "x1", "x2"), kept(), kept(), tuple(steps))


@given(passes(), st.randoms(use_true_random=False))
@settings(max_examples=500, deadline=None)
def test_rules_keep_the_results_of_a_random_pass(pass_: Pass, random: Any):
    decisions: dict[Any, bool] = {}

    def allowed(rule: str, first: Step, second: Step) -> bool:
        return decisions.setdefault((rule, first, second), random.random() < 0.8)

    fused = fuse(pass_, allowed)
    assert evaluated(fused) == evaluated(pass_)
    assert len(fused.steps) <= len(pass_.steps)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@given(passes())
@settings(max_examples=60, deadline=None)
def test_each_rule_alone_keeps_the_results_of_a_random_pass(rule: Any, pass_: Pass):
    fused = fuse(pass_, lambda *_: True, (rule,))
    assert evaluated(fused) == evaluated(pass_)


@given(passes())
@settings(max_examples=200, deadline=None)
def test_overlap_keeps_the_results_of_a_random_pass_and_the_order_of_collectives(pass_: Pass):
    moved = overlap(pass_)
    assert evaluated(moved) == evaluated(pass_)
    for half in ("begin", "wait"):
        order = [[step for step in each.steps if step.op.endswith(half)] for each in (pass_, moved)]
        assert order[0] == order[1]


@given(passes())
@settings(max_examples=200, deadline=None)
def test_a_buffer_is_freed_once_and_never_read_again(pass_: Pass):
    freed = freed_after(pass_)
    gone: set[str] = set()
    for step, names in zip(pass_.steps, freed, strict=True):
        assert not gone & set(step.reads())
        assert not gone & set(names)
        gone |= set(names)
    assert not gone & pass_.kept()
    made = [name for step in pass_.steps for name in step.makes()]
    assert set(made) <= gone | pass_.kept()
    assert list(buffers(pass_)) == [*pass_.inputs, *made]


def example(op: str, *inputs: str, results: tuple[str, ...], **fields: Any) -> Step:
    chosen = SETTINGS.get(op, Activation("activation", "gelu") if op == "activation" else None)
    return Step(op, inputs, results, chosen)


PRODUCT = example("product", "x0", "x1", results=("y",))
MERGES = {
    "bias in product": [PRODUCT, example("add_bias", "y", "x2", results=("z",))],
    "codes with sums": [
        example("column_sum", "x0", results=("z",)),
        example("cast", "x0", results=("row", "column")),
    ],
    "codes from producer": [
        example("norm", "x0", "x1", "x2", results=("y", "mean", "rstdev")),
        example("cast", "y", results=("z", "column")),
    ],
    "activation in product": [PRODUCT, example("activation", "y", results=("z",))],
    "activation gradient in product": [PRODUCT, example("activation_backward", "y", "x2", results=("z",))],
    "quantized product": [PRODUCT, example("quantize", "y", results=("z",))],
    "accumulated product": [PRODUCT, example("accumulate", "x2", "y", results=("z",))],
    "sum in norm backward": [
        example("norm_backward", "x0", "x1", "x1", "x1", "x2", results=("y", "dgamma", "dbeta")),
        example("add", "y", "x0", results=("z",)),
    ],
}


@pytest.mark.parametrize("name", MERGES)
def test_a_rule_merges_its_two_steps_into_one(name: str):
    pass_ = Pass(("x0", "x1", "x2"), ("z",), (), tuple(MERGES[name]))
    fused = fuse(pass_, lambda *_: True)
    assert len(fused.steps) == 1
    assert evaluated(fused) == evaluated(pass_)


def test_codes_and_sums_of_an_activation_gradient_are_one_step():
    steps = (
        example("activation_backward", "x0", "x1", results=("dy",)),
        example("column_sum", "dy", results=("sums",)),
        example("cast", "dy", results=("row", "column")),
    )
    pass_ = Pass(("x0", "x1"), ("row", "column", "sums"), (), steps)
    (only,) = fuse(pass_, lambda *_: True).steps
    assert only.op == "activation_backward" and only.results == ("row", "column", "sums")


@pytest.mark.parametrize("keep", ["results", "saved"])
def test_a_matrix_that_is_returned_or_saved_is_not_fused_away(keep: str):
    steps = tuple(MERGES["codes from producer"])
    results, saved = (("z", "y"), ()) if keep == "results" else (("z",), ("y",))
    pass_ = Pass(("x0", "x1", "x2"), results, saved, steps)
    assert fuse(pass_, lambda *_: True) == pass_


def test_a_removed_identity_cast_leaves_the_matrix_to_its_readers():
    steps = (
        Step("cast", ("x0",), ("row", "column"), CAST),
        Step("product", ("row", "x1"), ("y",), Product("linear", "forward")),
        Step("product", ("x1", "column"), ("z",), Product("linear", "grad_input")),
    )
    read = without_identity_casts(Pass(("x0", "x1"), ("y", "z"), ("column",), steps), lambda cast: True)
    assert [step.inputs for step in read.steps] == [("x0", "x1"), ("x1", "x0")]
    assert [step.settings.turned for step in read.steps] == [(False, False), (False, True)]  # pyright: ignore
    assert read.saved == ("x0",)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ((Step("add", ("x0", "absent"), ("y",)),), "'absent', which no earlier step makes"),
        ((Step("add", ("x0", "x0"), ("x0",)),), "makes 'x0' a second time"),
        ((), "no step makes 'y'"),
    ],
)
def test_a_pass_rejects_steps_that_do_not_fit_together(steps: tuple[Step, ...], message: str):
    with pytest.raises(ValueError, match=message):
        Pass(("x0",), ("y",), (), steps)


FACTS = st.builds(
    LinearFacts,
    bias=st.booleans(),
    grad_input=st.booleans(),
    grad_weight=st.booleans(),
    grad_bias=st.booleans(),
    plain=st.booleans(),
    backward=st.sampled_from(["quantized", "high_precision", "dequantized"]),
    keep_input=st.booleans(),
    mode=st.sampled_from([None, "row", "column"]),
    sequence=st.booleans(),
    quantized_output=st.booleans(),
    quantized_grad_input=st.booleans(),
    gather_input=st.sampled_from(["values", "codes", "row_codes", "once"]),
    gather_gradient=st.sampled_from(["values", "codes", "row_codes"]),
)


def number_of_gathers(facts: LinearFacts) -> int:
    """Return how many matrices a layer gathers, forward and backward."""
    if facts.gathers_input:
        return 1 + (facts.grad_weight and facts.gather_input != "once")
    if not facts.gathers_gradient:
        return 0
    if facts.backward != "quantized" or facts.gather_gradient == "values":
        return 1
    if facts.gather_gradient == "codes":
        return facts.grad_input + facts.grad_weight
    return int(facts.grad_input or facts.grad_weight)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("keep_input", [False, True])
@pytest.mark.parametrize("backward", ["quantized", "high_precision", "dequantized"])
@pytest.mark.parametrize("gather", ["values", "codes", "row_codes"])
def test_a_shard_is_saved_and_gathered_while_the_input_gradient_is_computed(
    plain, keep_input, backward, gather
):
    if plain and (backward != "quantized" or keep_input or gather != "values"):
        return
    facts = LinearFacts(
        mode="column",
        sequence=True,
        plain=plain,
        keep_input=keep_input,
        backward=backward,
        gather_input=gather,
    )
    forward, back = (overlap(fuse(pass_, lambda *_: False)) for pass_ in linear_passes(facts))
    gathered = [step.results[0] for step in forward.steps if step.op == "all_gather.wait"]
    made = set(gathered)
    for step in forward.steps:
        if made.intersection(step.reads()):
            made.update(step.makes())
    assert not made.intersection(forward.kept() - set(forward.results))
    order = [
        step.op for step in back.steps if step.op in ("product", "weight_gradient") or "gather" in step.op
    ]
    assert order == ["all_gather.begin", "product", "all_gather.wait", "weight_gradient"]


@given(FACTS)
@settings(max_examples=300, deadline=None)
def test_passes_of_a_linear_layer_fit_together(facts: LinearFacts):
    if facts.plain:
        facts = LinearFacts(
            **{
                **{name: getattr(facts, name) for name in LinearFacts._fields},
                "backward": "quantized",
                "keep_input": False,
                "gather_input": "values",
                "gather_gradient": "values",
            }
        )
    forward, backward = linear_passes(facts)
    saved = [name for name in forward.saved if name is not None]
    assert backward.inputs == ("grad_output", *saved)
    assert [name is not None for name in backward.results] == [
        facts.grad_input,
        facts.grad_weight,
        facts.grad_bias,
    ]
    operations = [step.op for step in (*forward.steps, *backward.steps)]
    assert facts.plain == ("cast" not in operations) or facts.backward != "quantized"
    assert sum(op == "all_gather.begin" for op in operations) == number_of_gathers(facts)
    for pass_ in (forward, backward):
        assert evaluated(overlap(fuse(pass_, lambda *_: True))) == evaluated(pass_)
