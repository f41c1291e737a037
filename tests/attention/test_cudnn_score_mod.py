"""score_mod(graph, score, tensors) in cuDNN's graphs: records and choice on any machine, values on a GPU."""

from __future__ import annotations

from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import transformer_engine.pytorch as te
from tests.attention.test_cudnn import installed as installed
from tests.attention.test_cudnn import relative, request
from tests.attention.test_score_graph import Softcap, inputs, oracle, relative_bias, softcap
from transformer_engine.common.dispatch import PlanFailure, use_backend
from transformer_engine.common.score_program import ScoreProgram, record
from transformer_engine.pytorch.attention.dot_product_attention.score_mod import (
    GraphScoreMod,
    bound_score_mod,
)
from transformer_engine.pytorch.primitives.attention import choose
from transformer_engine.pytorch.primitives.attention.backends import cudnn, cudnn_graph, cudnn_plan
from transformer_engine.pytorch.primitives.attention.backends.cudnn_score_mod import bound_tensors


def identity_score(graph, score, tensors):
    return score


def add_bias(graph, score, tensors):
    return graph.add(a=tensors["bias"], b=score)


def causal(graph, score, tensors):
    """Causal scores up to the query, with the dtypes that the frontend's samples set."""
    query, key = graph.gen_index(input=score, axis=2), graph.gen_index(input=score, axis=3)
    query.set_data_type(torch.int32)
    key.set_data_type(torch.int32).set_name("key")
    visible = graph.cmp_ge(input=query, comparison=key, name="visible")
    return graph.binary_select(input0=score, input1=tensors["hidden"], mask=visible)


def causal_gradient(graph, gradient, tensors):
    return causal(graph, gradient, {"hidden": tensors["zero"]})


def graph_score_mod(function, tensors=None, bprop=None, bprop_tensors=None) -> GraphScoreMod:
    bound = bound_score_mod(function, tensors, bprop, bprop_tensors)
    assert isinstance(bound, GraphScoreMod)
    return bound


def graph_softcap(**options: Any) -> GraphScoreMod:
    capping = Softcap()
    tensors = {"cap": torch.tensor(0.7)}
    return graph_score_mod(
        capping.forward, tensors, capping.backward, {"factor": torch.tensor(1.0)}
    )


def record_program(function, *names: str) -> ScoreProgram:
    program = record(function, names, None, ())
    assert isinstance(program, ScoreProgram), program
    return program


def test_functions_that_build_equal_graphs_have_equal_programs():
    def again(graph, score, tensors):
        ratio = graph.div(a=score, b=tensors["cap"])
        return graph.mul(a=graph.tanh(input=ratio), b=tensors["cap"])

    program = record_program(softcap, "cap")
    assert program == record_program(again, "cap") and hash(program) == hash(
        record_program(again, "cap")
    )
    assert [step.method for step in program.modify] == ["div", "tanh", "mul"]
    assert program != record_program(lambda graph, score, tensors: graph.tanh(score), "cap")
    # A graph's own names are operations, never attributes of the recorder.
    assert [step.method for step in record_program(relative_bias, "slope", "hidden").modify].count(
        "add"
    ) == 1


def test_a_changed_closure_is_another_program():
    axes = [2]

    def positions(graph, score, tensors):
        return graph.add(score, graph.gen_index(score, axis=axes[0]))

    first, same = graph_score_mod(positions), graph_score_mod(positions)
    axes[0] = 3
    changed = graph_score_mod(positions)
    assert first == same and hash(first) == hash(same)
    assert first != changed and first.recorded.program != changed.recorded.program
    slope = torch.zeros(1, 4, 1, 1)
    frozen = graph_score_mod(add_bias, {"bias": slope})
    assert frozen == graph_score_mod(add_bias, {"bias": slope})
    slope.requires_grad_()
    assert frozen != graph_score_mod(add_bias, {"bias": slope})


def test_steps_without_a_reader_are_left_out():
    def wasteful(graph, score, tensors):
        graph.exp(score)
        graph.add(score, tensors["unused"]).set_data_type(torch.float32)
        return graph.mul(score, tensors["used"])

    needed = record_program(wasteful, "unused", "used").needed(with_gradient=False)
    assert [step.method for step in needed.modify] == ["mul"] and needed.operands() == {3}
    program = graph_softcap().recorded.program
    assert isinstance(program, ScoreProgram)
    assert not program.needed(with_gradient=False).differentiate
    assert [step.method for step in program.needed(with_gradient=True).differentiate] == [
        "tanh_backward",
        "mul",
    ]


@pytest.mark.parametrize(
    ("function", "adds"),
    [
        (identity_score, True),
        (add_bias, True),
        (lambda g, s, t: g.sub(g.identity(s), t["bias"]), True),
        (lambda g, s, t: g.add(s, g.mul(t["bias"], g.gen_index(s, axis=3))), True),
        (lambda g, s, t: g.sub(t["bias"], s), False),
        (lambda g, s, t: g.add(s, s), False),
        (lambda g, s, t: g.add(s, g.exp(s)), False),
        (lambda g, s, t: g.mul(s, t["bias"]), False),
        (lambda g, s, t: t["bias"], False),
        (lambda g, s, t: g.binary_select(s, t["bias"], g.cmp_ge(s, t["bias"])), False),
    ],
)
def test_only_additions_have_derivative_one(function, adds):
    assert record_program(function, "bias").adds_only() is adds


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda g, s, t: s * 2.0, "unsupported operand"),
        (lambda g, s, t: torch.tanh(s), "tanh"),
        (lambda g, s, t: g.add(s, s.shape[0]), "uses .shape of a tensor of the graph"),
        (lambda g, s, t: g.matmul(s, s), "calls graph.matmul, which is not a pointwise operation"),
        (lambda g, s, t: g.exp(s).set_output(True), "uses .set_output of a tensor"),
        (lambda g, s, t: g.add(s, t["absent"]), "absent"),
        (lambda g, s, t: g.add(s, object()), "a value of type object"),
        (lambda g, s, t: None, "returns a value of type NoneType"),
    ],
)
def test_a_function_that_cannot_be_recorded_has_a_reason(function, words, installed):
    score_mod = graph_score_mod(function)
    assert isinstance(score_mod.recorded.program, str) and words in score_mod.recorded.program
    call = request("no_mask", score_mod=score_mod, needs_gradient=False)
    assert cudnn.BACKEND.rejection_reason(call) == score_mod.recorded.program


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"score_mod": lambda score, b, h, i, j: score}, "score_mod takes indices"),
        ({"mask": "causal"}, "attn_mask_type='causal'; supported: 'no_mask'"),
        ({"window": (4, 4)}, "window_size=(4, 4)"),
        ({"softmax": "learnable"}, "softmax_type='learnable'"),
        ({"dropout": 0.1}, "attention_dropout=0.1"),
        ({"max_logit": True}, "return_max_logit=True"),
        ({"bias": "post_scale_bias", "bias_shape": (1, 4, 256, 256)}, "core_attention_bias_type"),
        ({"q_format": "thd", "kv_format": "thd"}, "packed sequences"),
        (
            {"score_mod": graph_score_mod(softcap, {"cap": torch.tensor(0.7)})},
            "give score_mod_bprop",
        ),
        (
            {"score_mod": graph_score_mod(add_bias, {"bias": torch.zeros(1, requires_grad=True)})},
            "gradients of score_mod_tensors",
        ),
        (
            {"score_mod": graph_score_mod(add_bias, {"bias": torch.zeros(1).int()})},
            "torch.int32; supported:",
        ),
        (
            {"score_mod": graph_score_mod(add_bias, {"bias": torch.zeros(1).double()})},
            "torch.float64; supported:",
        ),
        (
            {"score_mod": graph_score_mod(add_bias, {"bias": torch.zeros(1, 3, 1, 1)})},
            "score_mod_tensors['bias'] is [1, 3, 1, 1], which does not broadcast to the scores [2, 4, 256, 256]",
        ),
        (
            {"score_mod": graph_score_mod(add_bias, {"bias": torch.zeros(2, 1, 1, 256)})},
            "gradients with score_mod_tensors['bias'] [2, 1, 1, 256], one row for all queries",
        ),
        (
            {
                "score_mod": graph_score_mod(
                    add_bias, {"bias": torch.zeros(1, 1, 1, 256).expand(1, 1, 256, 256)}
                )
            },
            "one row for all queries; give a row for each",
        ),
        (
            {
                "score_mod": graph_score_mod(add_bias, {"bias": torch.zeros(2, 4, 1, 1)}),
                "needs_gradient": False,
            },
            "score_mod_tensors['bias'] [2, 4, 1, 1], one number for each sequence",
        ),
        # The library crashes on these graphs.
        (
            {
                "score_mod": graph_score_mod(
                    lambda g, s, t: g.add(g.mul(t["bias"], t["bias"]), s),
                    {"bias": torch.zeros(1, 4, 1, 1)},
                )
            },
            "graph.mul of score_mod_tensors alone; compute it before the call",
        ),
        (
            {"score_mod": graph_score_mod(lambda g, s, t: t["bias"], {"bias": torch.zeros(1)})},
            "does not depend on the scores",
        ),
        (
            {"score_mod": graph_score_mod(lambda g, s, t: g.tanh(g.gen_index(s, axis=3)))},
            "does not depend on the scores",
        ),
        (
            {
                "score_mod": graph_score_mod(
                    identity_score, {}, lambda g, d, t: t["zero"], {"zero": torch.zeros(1)}
                )
            },
            "does not depend on the gradient",
        ),
    ],
)
def test_unsupported_calls_name_the_reason(options, words, installed):
    call = request(**{"mask": "no_mask", "score_mod": graph_softcap(), **options})
    assert words in (cudnn.BACKEND.rejection_reason(call) or "")


def test_the_choice_falls_back_with_the_librarys_reason(installed, monkeypatch):
    call = request("no_mask", score_mod=graph_softcap())
    assert cudnn.BACKEND.rejection_reason(call) is None
    chosen = [verdict.backend for verdict in choose.explain(call) if verdict.chosen]
    assert chosen == ["cudnn"]
    no_gradient = request("no_mask", score_mod=graph_score_mod(softcap), needs_gradient=False)
    assert "cannot be recorded" in (cudnn.BACKEND.rejection_reason(no_gradient) or "")

    def fails(*key: Any) -> Any:
        raise RuntimeError("cuDNN has no engine for this attention")

    monkeypatch.setattr(cudnn, "has_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        cudnn, "bound_tensors", lambda call, device: bound_tensors(call, torch.device("cpu"))
    )
    monkeypatch.setattr(cudnn, "_plan", fails)
    rejected = request("no_mask", score_mod=graph_softcap())
    assert cudnn.bind(rejected) == PlanFailure("cuDNN has no engine for this attention")
    bound = choose.choose(rejected)
    assert bound.name in ("flex", "reference")
    reasons = {verdict.backend: verdict.reason for verdict in choose.explain(rejected)}
    assert reasons["cudnn"] == "cuDNN has no engine for this attention"
    # A number where the library takes a tensor: the bindings raise TypeError.
    numbers = request("no_mask", score_mod=graph_score_mod(lambda g, s, t: g.add(s, 2.0)))
    error = TypeError("add(): incompatible function arguments.\n1. (self: ..)")
    monkeypatch.setattr(cudnn, "_plan", lambda *key: (_ for _ in ()).throw(error))
    assert cudnn.bind(numbers) == PlanFailure("add(): incompatible function arguments.")
    inference = request(
        "no_mask",
        score_mod=graph_score_mod(add_bias, {"bias": torch.zeros(2, 1, 1, 256)}),
        needs_gradient=False,
    )
    assert cudnn.BACKEND.rejection_reason(inference) is None


class LoggedTensor:
    """A graph tensor that logs its setters."""

    def __init__(self, name: str, log: list[Any]):
        self.name, self.log = name, log

    def __getattr__(self, method: str):
        if not method.startswith("set_"):
            raise AttributeError(method)

        def configure(value: Any) -> LoggedTensor:
            self.log.append((method, self.name, value))
            return self

        return configure


class LoggedGraph:
    """A frontend graph that logs its operations, and calls an attention's functions twice.

    The frontend, too, expands an attention more than once if it compares implementations.
    """

    def __init__(self, **options: Any):
        self.log: list[Any] = []
        self.inputs: dict[str, dict[str, Any]] = {}
        self.passes: list[list[Any]] = []

    def tensor(self, **options: Any) -> LoggedTensor:
        self.inputs[options["name"]] = options
        return LoggedTensor(options["name"], [])

    def sdpa(self, score_mod=None, **options: Any):
        return self._expanded(score_mod, None), self.operation("stats")

    def sdpa_backward(self, score_mod=None, score_mod_bprop=None, **options: Any):
        self._expanded(score_mod, score_mod_bprop)
        return tuple(LoggedTensor(name, []) for name in ("dq", "dk", "dv"))

    def _expanded(self, score_mod, bprop) -> LoggedTensor:
        while True:
            self.log.clear()
            result = score_mod(self, LoggedTensor("score", self.log))
            if bprop is not None:
                result = bprop(self, LoggedTensor("gradient", self.log))
            self.passes.append(list(self.log))
            if len(self.passes) == 2:
                return LoggedTensor(result.name, [])

    def operation(self, method: str, *arguments: Any, **named: Any) -> LoggedTensor:
        args = [getattr(value, "name", value) for value in (*arguments, *named.values())]
        self.log.append((method, *args))
        return LoggedTensor(f"{method}({','.join(map(str, args))})", self.log)

    def __getattr__(self, method: str):
        return lambda *arguments, **named: self.operation(method, *arguments, **named)


@pytest.fixture
def library(monkeypatch):
    fake: Any = ModuleType("cudnn")
    fake.pygraph = LoggedGraph
    fake.create_handle = fake.set_stream = None
    fake.data_type = SimpleNamespace(FLOAT="FLOAT")
    fake.diagonal_alignment = SimpleNamespace(TOP_LEFT=0, BOTTOM_RIGHT=1)
    monkeypatch.setattr(cudnn_graph, "library", lambda: fake)
    monkeypatch.setattr(cudnn_plan, "library", lambda: fake)
    monkeypatch.setattr(cudnn_graph, "data_type", str)


def describe_graph(describe, score_mod: GraphScoreMod) -> LoggedGraph:
    call = request("no_mask", score_mod=score_mod)
    strides = (256 * 4 * 64, 4 * 64, 64, 1)
    modifier, _ = bound_tensors(call, torch.device("cpu"))
    argument = cudnn_plan.Strided(strides, strides, strides, strides, modifier=modifier)
    description = describe(call, argument)
    assert set(description.graph.inputs) <= set(description.roles)
    return description.graph


def test_the_library_gets_the_operations_in_order_with_bound_tensors(library):
    graph = describe_graph(cudnn_plan.describe_forward, graph_softcap())
    assert (
        graph.passes[0]
        == graph.passes[1]
        == [
            ("div", "score", "score_mod_0"),
            ("tanh", "div(score,score_mod_0)"),
            ("mul", "tanh(div(score,score_mod_0))", "score_mod_0"),
        ]
    )
    assert graph.inputs["score_mod_0"]["is_pass_by_value"] and "score_mod_1" not in graph.inputs
    assert not graph.inputs["q"]["is_pass_by_value"]
    backward = describe_graph(cudnn_plan.describe_backward, graph_softcap())
    # The gradient reads the ratio that the function has computed in the same graph.
    assert backward.passes[0] == backward.passes[1]
    assert backward.passes[0][-2:] == [
        ("tanh_backward", "gradient", "div(score,score_mod_0)"),
        ("mul", "tanh_backward(gradient,div(score,score_mod_0))", "score_mod_1"),
    ]
    assert graph.inputs["score_mod_0"]["uid"] == backward.inputs["score_mod_0"]["uid"]


def test_setters_reach_the_librarys_tensors(library):
    tensors, zero = {"hidden": torch.tensor(-1e9)}, {"zero": torch.tensor(0.0)}
    graph = describe_graph(
        cudnn_plan.describe_backward, graph_score_mod(causal, tensors, causal_gradient, zero)
    )
    assert graph.passes[0][:5] == [
        ("gen_index", "score", 2),
        ("gen_index", "score", 3),
        ("set_data_type", "gen_index(score,2)", torch.int32),
        ("set_data_type", "gen_index(score,3)", torch.int32),
        ("cmp_ge", "gen_index(score,2)", "gen_index(score,3)"),
    ]
    assert graph.passes[0][-1][:3] == ("binary_select", "gradient", "score_mod_1")


def test_tensors_are_bound_contiguous_without_expanded_dimensions():
    full = torch.zeros(2, 256, 4, 256).transpose(1, 2)
    tensors = {
        "scalar": torch.tensor(3.0),
        "expanded": torch.zeros(1, 4, 256, 1).expand(2, 4, 256, 256),
        "transposed": torch.zeros(2, 4, 256, 256).transpose(2, 3),
        "whole": full,
    }
    modifier, bound = bound_tensors(
        request("no_mask", score_mod=graph_score_mod(identity_score, tensors)), torch.device("cpu")
    )
    assert modifier is not None
    shapes = [operand.shape for operand in modifier.operands]
    assert shapes == [(1, 1, 1, 1), (1, 4, 256, 1), (2, 4, 256, 256), (2, 4, 256, 256)]
    assert [operand.on_host for operand in modifier.operands] == [True, False, False, False]
    assert bound[0].data_ptr() == tensors["scalar"].data_ptr()  # a later value reaches the kernel
    assert all(tensor.is_contiguous() for tensor in bound) and bound[1].numel() == 4 * 256
    assert [operand.strides[-1] for operand in modifier.operands] == [1, 1, 1, 1]


@pytest.mark.parametrize("gradient", [causal_gradient, None])
def test_setters_have_no_effect_where_torch_computes_the_graph(gradient):
    (q, k, v), hidden = inputs(), torch.triu(torch.ones(7, 7, dtype=torch.bool), 1)
    layer = te.DotProductAttention(
        4, 16, num_gqa_groups=2, qkv_format="bshd", attn_mask_type="no_mask"
    )
    zero = None if gradient is None else {"zero": torch.tensor(0.0)}
    got = layer(
        q,
        k,
        v,
        score_mod=causal,
        score_mod_tensors={"hidden": torch.tensor(-1e9)},
        score_mod_bprop=gradient,
        score_mod_bprop_tensors=zero,
    )
    reference = oracle(q, k, v, lambda scores: scores.masked_fill(hidden, -1e9))
    torch.testing.assert_close(got.double(), reference, rtol=1e-5, atol=1e-6)
    actual, expected = (
        torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (got, reference)
    )
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625]).view(1, 4, 1, 1)


def distances(scores: Tensor) -> Tensor:
    rows, columns = (torch.arange(size, device=scores.device) for size in scores.shape[-2:])
    return columns - rows[:, None]


def alibi(graph, score, tensors):
    distance = graph.sub(graph.gen_index(score, axis=3), graph.gen_index(score, axis=2))
    return graph.add(score, graph.mul(tensors["slope"], distance))


def case(name: str, size: tuple[int, int]) -> tuple[dict[str, Any], Any]:
    """Arguments for a call on a GPU, and the same score function in plain PyTorch."""
    if name == "unchanged":
        return {"score_mod": identity_score}, lambda s: s
    if name == "softcap":
        capping = Softcap()
        options = {"score_mod": capping.forward, "score_mod_bprop": capping.backward}
        tensors = {"score_mod_tensors": {"cap": torch.tensor(0.7)}}
        factor = {"score_mod_bprop_tensors": {"factor": torch.tensor(1.0)}}
        return {**options, **tensors, **factor}, lambda s: 0.7 * torch.tanh(s / 0.7)
    if name == "causal":
        options = {"score_mod": causal, "score_mod_bprop": causal_gradient}
        tensors = {"score_mod_tensors": {"hidden": torch.tensor(-1e9)}}
        zero = {"score_mod_bprop_tensors": {"zero": torch.tensor(0.0)}}
        return {**options, **tensors, **zero}, lambda s: s.masked_fill(distances(s) > 0, -1e9)
    if name == "alibi":
        slope = SLOPES.cuda()
        return {
            "score_mod": alibi,
            "score_mod_tensors": {"slope": slope},
        }, lambda s: s + slope * distances(s)
    shape = {
        "bias": (1, 4, *size),
        "bias of sequences": (2, 1, *size),
        "bias of queries": (2, 1, size[0], 1),
    }
    bias = torch.randn(shape[name], device="cuda")
    return {"score_mod": add_bias, "score_mod_tensors": {"bias": bias}}, lambda s: s + bias


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name",
    ["unchanged", "softcap", "causal", "alibi", "bias", "bias of sequences", "bias of queries"],
)
@pytest.mark.parametrize(
    ("dtype", "tensor_format", "sizes", "groups", "depth"),
    [
        (torch.bfloat16, "bshd", (256, 256), 2, 64),
        (torch.float16, "sbhd", (256, 256), 4, 128),
        (torch.bfloat16, "bshd", (136, 200), 1, 64),
    ],
)
def test_cudnn_computes_the_function_and_its_gradient(
    name, dtype, tensor_format, sizes, groups, depth
):
    pytest.importorskip("cudnn")
    torch.manual_seed(0)
    leaves = [
        torch.randn(2, size, heads, depth, device="cuda").to(dtype)
        for size, heads in ((sizes[0], 4), (sizes[1], groups), (sizes[1], groups))
    ]
    options, change = case(name, sizes)
    wide = [x.double().requires_grad_() for x in leaves]
    reference = oracle(wide[0], wide[1], wide[2], change)
    if tensor_format == "sbhd":
        leaves = [x.transpose(0, 1).contiguous() for x in leaves]
    leaves = [x.requires_grad_() for x in leaves]
    layer = te.DotProductAttention(
        4, depth, num_gqa_groups=groups, qkv_format=tensor_format, attn_mask_type="no_mask"
    )
    with use_backend(attention="cudnn"):
        got = layer(*leaves, **options)
        with torch.no_grad():
            inference = layer(*leaves, **options)
    gradient = torch.randn_like(reference)
    expected = [reference, *torch.autograd.grad(reference, wide, gradient)]
    transposed = gradient.transpose(0, 1) if tensor_format == "sbhd" else gradient
    results = [got, *torch.autograd.grad(got, leaves, transposed.to(dtype))]
    assert torch.equal(inference, got)
    limit = 0.006 if dtype == torch.bfloat16 else 0.001
    for part, actual, original in zip(("o", "dq", "dk", "dv"), results, expected, strict=True):
        if tensor_format == "sbhd":
            original = original.transpose(0, 1)
        assert relative(actual, original) < limit, part


@pytest.mark.gpu
def test_a_warm_call_reads_new_values_and_a_changed_closure():
    pytest.importorskip("cudnn")
    layer = te.DotProductAttention(4, 64, qkv_format="bshd", attn_mask_type="no_mask").eval()
    q, k, v = (torch.randn(2, 128, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    cap, apply = torch.tensor(0.7), [True]

    def capping(graph, score, tensors):
        return softcap(graph, score, tensors) if apply[0] else score

    for value, applied in ((0.7, True), (0.1, True), (0.1, False)):
        cap.fill_(value)
        apply[0] = applied
        with use_backend(attention="cudnn"):
            got = layer(q, k, v, score_mod=capping, score_mod_tensors={"cap": cap})
        capped_at = partial(lambda limit, s: limit * torch.tanh(s / limit), value)
        want = oracle(q, k, v, capped_at if applied else lambda s: s)
        assert relative(got, want) < 0.004


def test_the_softcap_argument_equals_a_softcap_graph():
    call = request("no_mask", softcap=0.7)
    modifier, tensors = bound_tensors(call, torch.device("cpu"))
    assert modifier is not None
    program = graph_softcap().recorded.program
    assert isinstance(program, ScoreProgram)
    assert [step.method for step in modifier.program.modify] == [
        step.method for step in program.modify
    ]
    assert [step.method for step in modifier.program.differentiate] == ["tanh_backward"]
    assert [float(tensor) for tensor in tensors] == [pytest.approx(0.7)]
    assert modifier.operands[0].on_host
    # The number is a tensor's value: softcaps share a program.
    assert bound_tensors(request("no_mask", softcap=3.0), torch.device("cpu"))[0] == modifier


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_a_softcap_is_a_float32_number_under_any_default_dtype(dtype):
    before = torch.get_default_dtype()
    limit = 30.3 if dtype is torch.bfloat16 else 30.4  # results are cached
    torch.set_default_dtype(dtype)
    try:
        _, (number,) = bound_tensors(request("no_mask", softcap=limit), torch.device("cpu"))
    finally:
        torch.set_default_dtype(before)
    assert number.dtype is torch.float32 and float(number) == pytest.approx(limit, rel=1e-6)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"softcap": 0.7}, None),
        (
            {"softcap": 0.7, "mask": "causal"},
            "softcap with attn_mask_type='causal'; supported: 'no_mask'",
        ),
        ({"softcap": 0.7, "max_logit": True}, "softcap with return_max_logit=True"),
        ({"softcap": 0.7, "q_format": "thd", "kv_format": "thd"}, "softcap with packed sequences"),
        ({"softcap": 0.7, "score_mod": graph_softcap()}, "softcap together with score_mod"),
    ],
)
def test_cudnn_computes_a_softcap_without_a_mask(options, words, installed):
    reason = cudnn.BACKEND.rejection_reason(request(**{"mask": "no_mask", **options}))
    assert (reason is None) if words is None else words in (reason or "")
