"""score_mod(graph, score, tensors): cuDNN graphs, compared with plain PyTorch on float64 copies."""

from __future__ import annotations

import inspect
import math
import weakref

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common.score_graph import ScoreGraph, builds_a_graph


def softcap(graph, score, tensors):
    """cap * tanh(score / cap)"""
    ratio = graph.div(a=score, b=tensors["cap"], name="ratio")
    return graph.mul(a=graph.tanh(input=ratio), b=tensors["cap"])


def relative_bias(graph, score, tensors):
    """score + slope[h] * (j - i), hidden for j > i"""
    query, key = graph.gen_index(score, axis=2), graph.gen_index(score, axis=3)
    biased = graph.add(score, graph.mul(tensors["slope"], graph.sub(key, query)))
    return graph.binary_select(biased, tensors["hidden"], graph.cmp_ge(input=query, comparison=key))


def clip_score(graph, score, tensors, low=-1.0, high=1.0):
    """clamp(score, low, high)"""
    return graph.min(graph.max(score, low), high)


def inputs(batch: int = 2, queries: int = 7, keys: int = 7, heads: int = 4, groups: int = 2):
    torch.manual_seed(0)
    shapes = ((batch, queries, heads, 16), (batch, keys, groups, 16), (batch, keys, groups, 16))
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def oracle(q, k, v, change):
    """Attention in float64 with a function on the scores [b, h, i, j]."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = change(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]))
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2)


def check(attention, leaves, change, **options):
    q, k, v = leaves[:3]
    got, expected = attention(q, k, v, **options), oracle(q, k, v, change)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)
    for actual, reference in zip(
        torch.autograd.grad(got.square().sum(), leaves),
        torch.autograd.grad(expected.square().sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(actual, reference.to(actual.dtype), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sizes", [(2, 7, 7), (1, 1, 5), (3, 4, 9)])
def test_a_graph_with_a_tensor_and_its_derivatives(sizes):
    leaves = [*inputs(*sizes), torch.full((1, 1, 1, 1), 0.7, requires_grad=True)]
    attention = te.DotProductAttention(
        4, 16, num_gqa_groups=2, qkv_format="bshd", attn_mask_type="no_mask"
    )
    cap = leaves[3]
    check(
        attention,
        leaves,
        lambda s: cap.double() * torch.tanh(s / cap.double()),
        score_mod=softcap,
        score_mod_tensors={"cap": cap},
    )


def test_a_graph_reads_indices_and_per_head_tensors():
    leaves = [*inputs(), torch.rand(1, 4, 1, 1, requires_grad=True)]
    slope = leaves[3]
    distance = torch.arange(7)[None, :] - torch.arange(7)[:, None]

    def change(scores):
        return (scores + slope.double() * distance).masked_fill(distance > 0, -1e9)

    attention = te.DotProductAttention(
        4, 16, num_gqa_groups=2, qkv_format="bshd", attn_mask_type="no_mask"
    )
    tensors = {"slope": slope, "hidden": torch.tensor(-1e9)}
    check(attention, leaves, change, score_mod=relative_bias, score_mod_tensors=tensors)


class Softcap:
    """A softcap whose gradient reads a tensor that the function computed, as in one graph."""

    def __init__(self) -> None:
        self.ratio = None

    def forward(self, graph, score, tensors):
        self.ratio = graph.div(score, tensors["cap"])
        return graph.mul(graph.tanh(self.ratio), tensors["cap"])

    def backward(self, graph, gradient, tensors):
        return graph.mul(graph.tanh_backward(loss=gradient, input=self.ratio), tensors["factor"])


def test_an_explicit_gradient_replaces_the_derivative():
    leaves, cap, softcap_of = inputs(), torch.full((1, 1, 1, 1), 0.7), Softcap()
    attention = te.DotProductAttention(
        4, 16, num_gqa_groups=2, qkv_format="bshd", attn_mask_type="no_mask"
    )
    options = {
        "score_mod": softcap_of.forward,
        "score_mod_bprop": softcap_of.backward,
        "score_mod_tensors": {"cap": cap},
    }

    def change(scores):
        return 0.7 * torch.tanh(scores / 0.7)

    check(
        attention, leaves, change, **options, score_mod_bprop_tensors={"factor": torch.tensor(1.0)}
    )
    doubled = attention(*leaves, **options, score_mod_bprop_tensors={"factor": torch.tensor(2.0)})
    plain = attention(*leaves, score_mod=softcap, score_mod_tensors={"cap": cap})
    assert torch.equal(doubled, plain)
    twice = torch.autograd.grad(doubled.square().sum(), leaves, create_graph=True)
    once = torch.autograd.grad(plain.square().sum(), leaves)
    torch.testing.assert_close(twice[0], 2.0 * once[0], rtol=1e-5, atol=1e-6)
    # values do not pass the scores
    torch.testing.assert_close(twice[2], once[2], rtol=1e-5, atol=1e-6)
    with pytest.raises(RuntimeError, match="score_mod_bprop"):
        twice[0].sum().backward()


def test_an_index_functions_gradient_is_the_explicit_one():
    leaves, calls = inputs(), []
    attention = te.DotProductAttention(
        4, 16, num_gqa_groups=2, qkv_format="bshd", attn_mask_type="no_mask"
    )

    def change(score, b, h, i, j, slope):
        return score + slope * (i - j) + 0.1 * score * score

    def derivative(gradient, score, b, h, i, j, factor):
        calls.append((score.shape, b.numel(), j.numel()))
        return factor * gradient * (1 + 0.2 * score)

    slope = torch.tensor(0.3, requires_grad=True)
    options = {"score_mod": change, "score_mod_tensors": {"slope": slope}}
    plain = attention(*leaves, **options)
    expected = torch.autograd.grad(plain.square().sum(), leaves)
    for factor in (1.0, 2.0):
        out = attention(
            *leaves,
            **options,
            score_mod_bprop=derivative,
            score_mod_bprop_tensors={"factor": torch.tensor(factor)},
        )
        assert torch.equal(out, plain)
        *actual, unused = torch.autograd.grad(
            out.square().sum(), [*leaves, slope], allow_unused=True
        )
        torch.testing.assert_close(actual[0], factor * expected[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(actual[1], factor * expected[1], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(actual[2], expected[2], rtol=1e-5, atol=1e-6)
        assert unused is None
    assert len(calls) == 2


def test_parameters_distinguish_the_two_contracts():
    assert builds_a_graph(softcap) and builds_a_graph(lambda graph, score, tensors, cap=1.0: score)
    assert not builds_a_graph(lambda score, b, h, i, j: score)
    assert not builds_a_graph(lambda score, *places: score)
    assert not builds_a_graph(lambda score, b, h, i, j, *, slope: score)
    assert builds_a_graph(Softcap().forward) and not builds_a_graph(torch.nn.Identity().forward)


def test_a_compiler_distinguishes_the_contracts_as_eager_mode_does():
    def tell(x):
        def nested(graph, score, tensors, cap=1.0):
            return score

        def index_values(score, b, h, i, j, cap=1.0):
            return score

        return x, [builds_a_graph(f) for f in (softcap, clip_score, oracle, nested, index_values)]

    torch._dynamo.reset()
    compiled = torch.compile(tell, fullgraph=True, backend="eager")
    assert compiled(torch.ones(1))[1] == tell(torch.ones(1))[1] == [True, True, False, True, False]


def test_signatures_are_inspected_once_per_function(monkeypatch):
    inspected, signature = [], inspect.signature
    monkeypatch.setattr(
        inspect, "signature", lambda function: inspected.append(function) or signature(function)
    )

    class Unhashable:
        __hash__ = None  # pyright: ignore[reportAssignmentType]

        def __call__(self, graph, score, tensors):
            return score

    def graph(graph, score, tensors):
        return score

    first, unhashable = Softcap(), Unhashable()
    for _ in range(3):
        assert (
            builds_a_graph(graph) and builds_a_graph(first.forward) and builds_a_graph(unhashable)
        )
    assert inspected.count(graph) == 1 and inspected.count(Softcap.forward) <= 1
    assert inspected.count(first.forward) == 0 and inspected[-1] is unhashable
    reference = weakref.ref(graph)
    inspected.clear()
    del graph
    assert reference() is None  # the cache keeps no function alive


def test_a_graph_cannot_compute_an_unknown_operation():
    q, k, v = inputs()
    attention = te.DotProductAttention(
        4, 16, num_gqa_groups=2, qkv_format="bshd", attn_mask_type="no_mask"
    )
    for score_mod, error, words in (
        (
            lambda graph, score, tensors: graph.matmul(score, score),
            NotImplementedError,
            "graph.matmul",
        ),
        (lambda graph, score, tensors: graph.add(score), TypeError, "takes 2 tensors, not 1"),
        (
            lambda graph, score, tensors: graph.relu(score, upper_clip=1.0),
            NotImplementedError,
            "upper_clip",
        ),
    ):
        with pytest.raises(error, match=words):
            attention(q, k, v, score_mod=score_mod)
    with pytest.raises(ValueError, match="4 dimensions"):
        attention(q, k, v, score_mod=softcap, score_mod_tensors={"cap": torch.ones(3)})


@pytest.mark.parametrize(
    "name", ["abs", "exp", "floor", "neg", "relu", "rsqrt", "sigmoid", "softplus", "swish", "tanh"]
)
def test_unary_graph_operations(name: str):
    x = torch.linspace(0.1, 3.0, 7)
    plain = {"softplus": torch.nn.functional.softplus, "swish": torch.nn.functional.silu}
    expected = plain[name](x) if name in plain else getattr(torch, name)(x)
    torch.testing.assert_close(getattr(ScoreGraph(torch, ()), name)(input=x), expected)


def test_scores_may_broadcast_and_have_another_dtype():
    q, k, v = (torch.randn(2, 3, 4, 8) for _ in range(3))
    layer = te.DotProductAttention(4, 8, attn_mask_type="no_mask", qkv_format="bshd")

    def positions(score, b, h, i, j):
        return (i - j).half()

    expected = torch.softmax(
        (torch.arange(3)[:, None] - torch.arange(3)).float(), dim=-1
    ) @ v.transpose(1, 2)
    torch.testing.assert_close(
        layer(q, k, v, score_mod=positions), expected.transpose(1, 2).flatten(2)
    )


@pytest.mark.parametrize(
    ("error", "score_mod"),
    [(ValueError, lambda s, b, h, i, j: s[..., :-1]), (TypeError, lambda s, b, h, i, j: None)],
)
def test_a_score_mod_that_does_not_return_scores_raises(error, score_mod):
    q, k, v = (torch.randn(2, 3, 4, 8) for _ in range(3))
    layer = te.DotProductAttention(4, 8, attn_mask_type="no_mask", qkv_format="bshd")
    with pytest.raises(error, match="score_mod returned"):
        layer(q, k, v, score_mod=score_mod)
