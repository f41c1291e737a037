"""The router's public functions: map formats, indices, leading dimensions, gradients, losses, rejections."""

from __future__ import annotations

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.pytorch.router import (
    QBHistogramMode,
    RoutingMapFormat,
    fused_compute_score_for_moe_aux_loss,
    fused_moe_aux_loss,
    fused_topk_with_score_function,
)

T, E, K = 12, 20, 4


@pytest.fixture
def logits(device) -> torch.Tensor:
    return torch.stack([torch.linspace(-3, 3, E)[torch.randperm(E)] for _ in range(T)]).to(device)


def topk(
    logits, k=K, score="softmax", pre=False, groups=(None, None), scale=None, bias=None, **options
):
    return fused_topk_with_score_function(logits, k, pre, *groups, scale, score, bias, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_softmax_over_the_top_k_equals_plain_pytorch(logits, dtype):
    x = logits.to(dtype).requires_grad_()
    probs, routing_map = topk(x)
    values, indices = x.float().topk(K)
    expected = torch.zeros_like(x).scatter(1, indices, values.softmax(1).to(dtype))
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-7}[dtype]
    assert probs.dtype is dtype and routing_map.dtype is torch.bool
    torch.testing.assert_close(probs, expected, rtol=tolerance, atol=1e-6)
    gradient = torch.randn_like(probs)
    actual, reference = (torch.autograd.grad(y, x, gradient)[0] for y in (probs, expected))
    torch.testing.assert_close(actual, reference, rtol=tolerance, atol=tolerance)


def test_leading_dimensions_are_kept(logits):
    probs, routing_map = topk(logits.view(3, 4, E), score="sigmoid", pre=True)
    flat, flat_map = topk(logits, score="sigmoid")
    assert torch.equal(probs.flatten(0, 1), flat) and torch.equal(
        routing_map.flatten(0, 1), flat_map
    )


@pytest.mark.parametrize("named", [RoutingMapFormat.BITMAP_U8, 1, "bitmap_u8"])
def test_a_bit_map_equals_the_byte_map(logits, named):
    x = logits.requires_grad_()
    probs, bits = topk(x, routing_map_format=named)
    expected, bytemap = topk(x)
    assert bits.dtype is torch.uint8 and bits.shape == (T, 3)
    places = torch.arange(E, device=x.device)
    assert torch.equal(((bits[:, places // 8] >> (places % 8)) & 1).bool(), bytemap)
    gradient = torch.randn_like(probs)
    actual, reference = (torch.autograd.grad(y, x, gradient)[0] for y in (probs, expected))
    assert torch.equal(probs, expected)
    # from two kernels, whose sums have their own order
    torch.testing.assert_close(actual, reference, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_indices_are_written_and_returned_instead_of_a_map(logits, dtype):
    x = logits.requires_grad_()
    argument = torch.full((T, K), -1, dtype=dtype, device=x.device)
    probs, indices = topk(x, score="sigmoid", topk_indices=argument)
    assert indices is argument
    assert torch.equal(argument.long(), x.topk(K).indices)
    expected = topk(x, score="sigmoid")[0]
    gradient = torch.randn_like(probs)
    actual, reference = (torch.autograd.grad(y, x, gradient)[0] for y in (probs, expected))
    assert torch.equal(actual, reference)


def test_a_single_sigmoid_expert_keeps_its_score(logits):
    probs, routing_map = topk(logits, 1, "sigmoid", scale=2.0)
    torch.testing.assert_close(probs[routing_map], 2 * logits.amax(1).sigmoid())


def test_experts_come_from_the_best_groups_only(logits):
    _, routing_map = topk(logits, score="sigmoid", groups=(5, 2))
    assert (routing_map.view(T, 5, 4).any(2).sum(1) <= 2).all() and (routing_map.sum(1) == K).all()


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_scores_over_all_experts_sum_to_one_and_have_a_gradient(logits, score):
    x = logits.requires_grad_()
    routing_map, scores = fused_compute_score_for_moe_aux_loss(x, K, score)
    assert scores.dtype is torch.float32 and (routing_map.sum(1) == K).all()
    torch.testing.assert_close(scores.sum(1), torch.ones(T, device=x.device))
    plain = {"softmax": lambda: x.softmax(1), "sigmoid": x.sigmoid}.get(
        score, lambda: torch.nn.functional.softplus(x).sqrt()
    )()
    expected = plain / plain.sum(1, keepdim=True)
    gradient = torch.randn_like(scores)
    actual, reference = (torch.autograd.grad(y, x, gradient)[0] for y in (scores, expected))
    torch.testing.assert_close(actual, reference, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [torch.int32, torch.int64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_loss_and_its_gradient_equal_plain_pytorch(device, kind, dynamic):
    probs = torch.rand(T, 2 * E, device=device, requires_grad=True)
    tokens = torch.arange(2 * E, device=device).to(kind)
    total = torch.tensor(T, device=device) if dynamic else T
    loss = fused_moe_aux_loss(probs, tokens, total, E, K, 0.01)
    expected = (probs.sum(0) * tokens).sum() * (E * 0.01 / (K * T * T))
    assert loss.shape == ()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    actual, reference = (torch.autograd.grad(y, probs)[0] for y in (loss, expected))
    torch.testing.assert_close(actual, reference, rtol=1e-5, atol=0)


X = torch.ones(T, E)
REJECTED = {
    "float64": (lambda: topk(X.double()), ValueError, r"logits is torch\.float64"),
    "no experts": (lambda: topk(X[:, :0]), ValueError, "at least one of each"),
    "k": (lambda: topk(X, 21), ValueError, "topk=21 > 20 experts"),
    "k of none": (lambda: topk(X, 0), ValueError, "topk=0 is below 1"),
    "score": (
        lambda: topk(X, score="relu"),
        ValueError,
        "choose one of softmax, sigmoid, sqrtsoftplus",
    ),
    "bias": (
        lambda: topk(X, bias=X[0]),
        ValueError,
        "expert_bias goes with 'sigmoid' and 'sqrtsoftplus'",
    ),
    "groups": (
        lambda: topk(X, groups=(3, 2)),
        ValueError,
        "num_groups=3 does not divide 20 experts",
    ),
    "many groups": (lambda: topk(X, groups=(4, 5)), ValueError, "group_topk=5 > num_groups=4"),
    "uneven": (lambda: topk(X, groups=(5, 3)), ValueError, "a topk that group_topk divides"),
    "format": (
        lambda: topk(X, routing_map_format="list"),
        ValueError,
        "choose one of bytemap, bitmap_u8",
    ),
    "format type": (
        lambda: topk(X, routing_map_format=1.0),
        TypeError,
        "routing_map_format=1.0 is a float",
    ),
    "indices": (
        lambda: topk(X, topk_indices=torch.zeros(T, 3, dtype=torch.int32)),
        ValueError,
        r"topk_indices is torch\.int32 \[12, 3\]",
    ),
    "indices and bits": (
        lambda: topk(X, topk_indices=torch.zeros(T, K, dtype=torch.int32), routing_map_format=1),
        ValueError,
        "leave routing_map_format 'bytemap'",
    ),
    "columns": (
        lambda: fused_moe_aux_loss(X, X[0], T, 7, K, 0.1),
        ValueError,
        "a multiple of num_experts=7",
    ),
    "counts": (
        lambda: fused_moe_aux_loss(X, X[0, :5], T, E, K, 0.1),
        ValueError,
        r"tokens_per_expert is \[5\]; give \[20\]",
    ),
    "total": (
        lambda: fused_moe_aux_loss(X, X[0], 0, E, K, 0.1),
        ValueError,
        "total_num_tokens=0 is below 1",
    ),
}


@pytest.mark.parametrize("name", REJECTED)
def test_invalid_router_calls_raise(name):
    call, kind, words = REJECTED[name]
    with pytest.raises(kind, match=words):
        call()


def route(x, bias):
    probs, routing_map = topk(x, score="sigmoid", scale=1.5, bias=bias, groups=(5, 2))
    _, scores = fused_compute_score_for_moe_aux_loss(x, K, "sigmoid")
    loss = fused_moe_aux_loss(scores, routing_map.sum(0), x.shape[0], E, K, 0.01)
    return (probs * x).sum() + loss


def test_router_functions_compile_in_one_graph(logits):
    bias = torch.zeros(E, device=logits.device)
    x = logits.requires_grad_()
    compiled = torch.compile(route, fullgraph=True, backend="aot_eager")
    actual, expected = compiled(x, bias), route(x, bias)
    torch.testing.assert_close(actual, expected)
    own, reference = (torch.autograd.grad(y, x)[0] for y in (actual, expected))
    torch.testing.assert_close(own, reference)


@pytest.mark.gpu
def test_router_functions_are_captured_in_a_graph(logits):
    x, bias = logits.cuda(), torch.zeros(E, device="cuda")
    route(x, bias)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = route(x, bias)
    x.copy_(x.flip(1))
    graph.replay()
    torch.testing.assert_close(result, route(x, bias))


def test_the_names_are_where_clients_import_them():
    assert te.router.fused_moe_aux_loss is fused_moe_aux_loss


def count_margins(logits, bias, k, bounds, bins, mode="two_kernel"):
    histogram = torch.zeros(logits.shape[-1], bins, dtype=torch.int32, device=logits.device)
    limits = torch.tensor(bounds, device=logits.device)
    options = {"qb_histogram": histogram, "qb_bin_bounds": limits, "qb_histogram_mode": mode}
    return topk(logits, k, "sigmoid", bias=bias, **options), histogram


@pytest.mark.parametrize("mode", ["two_kernel", QBHistogramMode.FUSED_ATOMIC])
def test_quantile_balancing_margins_are_counted_and_accumulate(logits, mode):
    bias = torch.linspace(-0.2, 0.2, E, device=logits.device)
    (probs, _), histogram = count_margins(logits, bias, K, (-1.0, 1.0), 16, mode)
    assert torch.equal(probs, topk(logits, score="sigmoid", bias=bias)[0])
    expected = torch.zeros_like(histogram)
    for token in logits.sigmoid():
        cutoff = (token + bias).sort(descending=True).values[K]
        for expert, score in enumerate(token):
            expected[expert, int(((cutoff - score + 1) * 16 / 2).floor().clamp(0, 15))] += 1
    # a margin on a bin's border
    assert (histogram - expected).abs().sum() <= 2 * (logits.device.type == "cuda")
    assert histogram.sum() == T * E
    limits = torch.tensor([-1.0, 1.0], device=logits.device)
    options = {"qb_histogram": histogram, "qb_bin_bounds": limits, "qb_histogram_mode": mode}
    topk(logits, score="sigmoid", bias=bias, **options)
    assert histogram.sum() == 2 * T * E


def test_tied_margins_are_zero_and_outliers_count_in_the_end_bins(device):
    x = torch.tensor([[1.0, 1.0, 1.0, -9.0, 9.0]], device=device)
    (_, chosen), histogram = count_margins(x, torch.zeros(5, device=device), 2, (0.0, 0.25), 4)
    assert chosen.tolist() == [[True, False, False, False, True]]
    assert histogram.tolist() == [[1, 0, 0, 0]] * 3 + [[0, 0, 0, 1], [1, 0, 0, 0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qb_bin_bounds": None}, "qb_bin_bounds is None; .* provided together"),
        ({"qb_histogram_mode": "three_kernel"}, "qb_histogram_mode='three_kernel'"),
        ({"score": "softmax", "bias": None}, "supported: 'sigmoid' with a bias"),
        ({"bias": None}, "expert_bias None"),
        ({"groups": (4, 2)}, "in groups"),
        ({"k": E}, "fewer than all"),
        ({"qb_histogram": torch.zeros(E, 4)}, "give contiguous int32"),
        ({"qb_bin_bounds": torch.tensor([1.0, 1.0])}, "give two finite numbers"),
    ],
)
def test_mismatched_histograms_are_rejected(logits, change, message):
    options = {
        "k": K,
        "score": "sigmoid",
        "bias": torch.zeros(E),
        "qb_histogram": torch.zeros(E, 4, dtype=torch.int32),
        "qb_bin_bounds": torch.tensor([0.0, 1.0]),
        "qb_histogram_mode": "two_kernel",
    }
    histogram = options["qb_histogram"]
    with pytest.raises(ValueError, match=message):
        topk(logits.cpu(), **(options | change))
    assert not histogram.any()
