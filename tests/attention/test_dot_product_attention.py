"""Every mask, window, bias and softmax in DotProductAttention equals a float64 loop, gradients included."""

from __future__ import annotations

import math
import sys

import pytest
import torch

from tests.attention.attention_oracle import attend, cumulative, padding_mask, visibility
from tests.support.tolerances import ATTENDED
from transformer_engine.common.dispatch import Unsupported, use_backend
from transformer_engine.pytorch.attention import DotProductAttention
from transformer_engine.pytorch.attention.dot_product_attention import describe, plan
from transformer_engine.pytorch.distributed import CudaRNGStatesTracker

MASKS = (
    "no_mask",
    "padding",
    "causal",
    "padding_causal",
    "causal_bottom_right",
    "padding_causal_bottom_right",
    "arbitrary",
)
LENGTHS_Q, LENGTHS_KV = [5, 3], [4, 6]


@pytest.fixture(params=("torch_sdpa", "reference"))
def backend(request):
    with use_backend(attention=request.param):
        yield request.param


def tensors(device, size_q=5, size_kv=6, heads=2, groups=2, width=4, width_v=4, batch=2, seed=0):
    """q, k, v and grad for the output, [b, s, h, d] float32."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (
        (batch, size_q, heads, width),
        (batch, size_kv, groups, width),
        (batch, size_kv, groups, width_v),
        (batch, size_q, heads * width_v),
    )
    return [torch.randn(shape, generator=generator).to(device) for shape in shapes]


def to_format(x, qkv_format):
    return x.transpose(0, 1).contiguous() if qkv_format == "sbhd" else x


def run(module, q, k, v, grad, qkv_format="bshd", extra=(), **options):
    """(output [b, s, h * d], gradients for q, k, v and extra, max_logit or None)."""
    leaves = [to_format(x, qkv_format).clone().requires_grad_() for x in (q, k, v)]
    try:
        out = module(*leaves, qkv_format=qkv_format, **options)
    except Unsupported as rejection:
        pytest.skip(str(rejection))
    out, max_logit = out if isinstance(out, tuple) else (out, None)
    gradients = torch.autograd.grad(out, [*leaves, *extra], to_format(grad, qkv_format))
    back = [to_format(x, qkv_format) for x in (out, *gradients[:3])]
    return back[0], [*back[1:], *gradients[3:]], max_logit


def oracle_results(q, k, v, grad, sees, extra=(), **options):
    leaves = [x.double().cpu().clone().requires_grad_() for x in (q, k, v)]
    out, max_logit = attend(*leaves, sees, **options)
    return out, torch.autograd.grad(out, [*leaves, *extra], grad.double().cpu()), max_logit


def assert_same(got, expected):
    for ours, reference in zip((got[0], *got[1]), (expected[0], *expected[1]), strict=True):
        torch.testing.assert_close(ours.double().cpu(), reference, **ATTENDED)


def mask_arguments(name, device, size_q=5, size_kv=6):
    """Keyword arguments for the mask `name`, and its rule in the oracle."""
    if name.startswith("padding"):
        arguments = {
            "cu_seqlens_q": cumulative(LENGTHS_Q, device),
            "cu_seqlens_kv": cumulative(LENGTHS_KV, device),
        }
        return arguments, {"lengths_q": LENGTHS_Q, "lengths_kv": LENGTHS_KV}
    if name == "arbitrary":
        masked = torch.rand(2, 1, size_q, size_kv, generator=torch.Generator().manual_seed(3)) < 0.4
        masked[1, 0, 2] = True
        return {"attention_mask": masked.to(device)}, {"masked": masked}
    return {}, {}


@pytest.mark.parametrize("qkv_format", ["bshd", "sbhd"])
@pytest.mark.parametrize("mask", MASKS)
def test_every_mask_equals_the_loop(mask, qkv_format, backend, device):
    q, k, v, grad = tensors(device)
    arguments, rule = mask_arguments(mask, device)
    module = DotProductAttention(2, 4, attn_mask_type=mask, attention_type="cross")
    got = run(module, q, k, v, grad, qkv_format, **arguments)
    assert_same(got, oracle_results(q, k, v, grad, visibility(mask, 5, 6, **rule)))


@pytest.mark.parametrize("sizes", [(6, 6), (3, 7), (7, 3)], ids=str)
@pytest.mark.parametrize("mask", ["causal", "causal_bottom_right"])
def test_causal_alignment_follows_the_mask_name(mask, sizes, backend, device):
    q, k, v, grad = tensors(device, *sizes)
    got = run(DotProductAttention(2, 4, attn_mask_type=mask), q, k, v, grad)
    assert_same(got, oracle_results(q, k, v, grad, visibility(mask, *sizes)))


@pytest.mark.parametrize("window", [(2, 0), (0, 0), (1, 2), (0, 3)], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_sliding_windows_equal_the_loop(mask, window, backend, device):
    if "causal" in mask and window[1]:
        pytest.skip("a causal mask has no right window")
    q, k, v, grad = tensors(device)
    arguments, rule = mask_arguments(mask, device)
    module = DotProductAttention(
        2, 4, attn_mask_type=mask, window_size=window, attention_type="cross"
    )
    got = run(module, q, k, v, grad, **arguments)
    assert_same(got, oracle_results(q, k, v, grad, visibility(mask, 5, 6, window=window, **rule)))


@pytest.mark.parametrize(
    "window", [(sys.maxsize, 0), (2**31 - 1, 0), (-1, 2**31 - 1), (2**40, 2**40)], ids=str
)
@pytest.mark.parametrize("mask", ["no_mask", "causal", "padding_causal_bottom_right"])
def test_windows_near_integer_limits_equal_the_loop(mask, window, backend, device):
    if mask == "no_mask" and min(window) < 0:
        pytest.skip("a mask without a causal name has no one-sided window")
    q, k, v, grad = tensors(device)
    arguments, rule = mask_arguments(mask, device)
    module = DotProductAttention(
        2, 4, attn_mask_type=mask, window_size=window, attention_type="cross"
    )
    got = run(module, q, k, v, grad, **arguments)
    window = (-1 if window[0] < 0 else 100, 0 if "causal" in mask or window[1] == 0 else 100)
    assert_same(got, oracle_results(q, k, v, grad, visibility(mask, 5, 6, window=window, **rule)))


def test_backends_receive_windows_of_at_most_the_longest_sequence(device, monkeypatch):
    calls = []

    def watch(*arguments, **options):
        described = describe.describe_call(*arguments, **options)
        calls.append(described[0])
        return described

    monkeypatch.setattr(plan, "describe_call", watch)
    q, k, v, _ = tensors(device)
    module = DotProductAttention(2, 4, attn_mask_type="no_mask", window_size=(2**40, 3))
    module(q, k, v, qkv_format="bshd")
    assert {call.mask.window for call in calls} == {(6, 3)}


@pytest.mark.parametrize("at_call", [False, True])
def test_windows_are_aligned_top_left_on_request(at_call, backend, device):
    q, k, v, grad = tensors(device)
    module = DotProductAttention(
        2,
        4,
        attn_mask_type="no_mask",
        window_size=(1, 1),
        bottom_right_diagonal=None if at_call else False,
    )
    options = {"bottom_right_diagonal": False} if at_call else {}
    got = run(module, q, k, v, grad, **options)
    rule = visibility("no_mask", 5, 6, window=(1, 1), windows_bottom_right=False)
    assert_same(got, oracle_results(q, k, v, grad, rule))


@pytest.mark.parametrize("width_v", [4, 6])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("mask", ["causal", "padding_causal"])
def test_grouped_heads_and_two_head_sizes(mask, groups, width_v, backend, device):
    q, k, v, grad = tensors(device, heads=4, groups=groups, width_v=width_v)
    arguments, rule = mask_arguments(mask, device)
    module = DotProductAttention(
        4, (4, width_v), num_gqa_groups=groups, attn_mask_type=mask, attention_type="cross"
    )
    got = run(module, q, k, v, grad, **arguments)
    assert_same(got, oracle_results(q, k, v, grad, visibility(mask, 5, 6, **rule)))


@pytest.mark.parametrize("shape", [(1, 2, 5, 6), (2, 2, 5, 6), (1, 1, 5, 6), (2, 1, 1, 6)], ids=str)
@pytest.mark.parametrize("kind", ["pre_scale_bias", "post_scale_bias"])
def test_biases_equal_the_loop_with_their_gradient(kind, shape, device):
    q, k, v, grad = tensors(device)
    bias = (
        torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
    )
    wide = bias.detach().double().cpu().requires_grad_()
    full = wide.expand(2, 2, 5, 6)
    module = DotProductAttention(2, 4, attn_mask_type="causal", softmax_scale=0.3)
    arguments = {"core_attention_bias_type": kind, "core_attention_bias": bias}
    got = run(module, q, k, v, grad, extra=[bias], **arguments)
    expected = oracle_results(
        q,
        k,
        v,
        grad,
        visibility("causal", 5, 6),
        extra=[wide],
        scale=0.3,
        bias=lambda b, h, i, j: full[b, h, i, j],
        bias_before_scale=kind == "pre_scale_bias",
    )
    assert_same(got, expected)


def press_slopes(heads):
    """Slopes from the recursive definition in Press et al."""
    if math.log2(heads).is_integer():
        start = 2.0 ** (-(2.0 ** -(math.log2(heads) - 3)))
        return [start * start**i for i in range(heads)]
    nearest = 2 ** math.floor(math.log2(heads))
    return press_slopes(nearest) + press_slopes(2 * nearest)[0::2][: heads - nearest]


@pytest.mark.parametrize("heads", [2, 3])
@pytest.mark.parametrize("argument", [None, "head", "batch"])
@pytest.mark.parametrize("mask", ["causal", "padding_causal_bottom_right", "no_mask"])
def test_alibi_equals_the_loop(mask, argument, heads, device):
    q, k, v, grad = tensors(device, heads=heads, groups=heads)
    arguments, rule = mask_arguments(mask, device)
    slopes = torch.tensor(press_slopes(heads)).repeat(2, 1)
    if argument == "head":
        slopes = torch.rand(heads, generator=torch.Generator().manual_seed(2)).repeat(2, 1)
        arguments["alibi_slopes"] = slopes[0].to(device)
    elif argument == "batch":
        slopes = torch.rand(2, heads, generator=torch.Generator().manual_seed(2))
        arguments["alibi_slopes"] = slopes.to(device)
    shifts = {"causal": [0, 0], "no_mask": [1, 1], "padding_causal_bottom_right": [-1, 3]}[mask]
    module = DotProductAttention(heads, 4, attn_mask_type=mask, attention_type="cross")
    got = run(module, q, k, v, grad, core_attention_bias_type="alibi", **arguments)
    expected = oracle_results(
        q,
        k,
        v,
        grad,
        visibility(mask, 5, 6, **rule),
        bias=lambda b, h, i, j: -slopes[b, h].double() * abs(i + shifts[b] - j),
    )
    assert_same(got, expected)


@pytest.mark.parametrize("mask", ["causal", "padding"])
@pytest.mark.parametrize("softmax_type", ["vanilla", "off-by-one", "learnable"])
def test_softmax_types_equal_the_loop_with_the_sinks_gradient(softmax_type, mask, device):
    q, k, v, grad = tensors(device)
    arguments, rule = mask_arguments(mask, device)
    module = DotProductAttention(
        2, 4, attn_mask_type=mask, softmax_type=softmax_type, attention_type="cross"
    ).to(device)
    sink, extra, wide = None, [], []
    if softmax_type == "off-by-one":
        sink = torch.zeros(2, dtype=torch.float64)
    if softmax_type == "learnable":
        torch.nn.init.constant_(module.softmax_offset, 0.7)
        sink = torch.full((2,), 0.7, dtype=torch.float64, requires_grad=True)
        extra, wide = [module.softmax_offset], [sink]
    got = run(module, q, k, v, grad, extra=extra, **arguments)
    assert_same(
        got, oracle_results(q, k, v, grad, visibility(mask, 5, 6, **rule), extra=wide, sink=sink)
    )


def test_the_learnable_offset_is_the_only_parameter_and_begins_at_zero(device):
    assert not list(DotProductAttention(4, 8).parameters())
    offset = DotProductAttention(4, 8, softmax_type="learnable").softmax_offset
    assert offset.shape == (4,) and offset.dtype == torch.float32 and not offset.any()


@pytest.mark.parametrize("mask", ["causal", "padding"])
def test_max_logit_is_the_largest_visible_score_of_each_head(mask, device):
    q, k, v, grad = tensors(device)
    arguments, rule = mask_arguments(mask, device)
    module = DotProductAttention(
        2, 4, attn_mask_type=mask, return_max_logit=True, attention_type="cross"
    )
    *got, max_logit = run(module, q, k, v, grad, **arguments)
    *expected, best = oracle_results(q, k, v, grad, visibility(mask, 5, 6, **rule))
    assert_same(got, expected)
    torch.testing.assert_close(max_logit.double().cpu(), best, **ATTENDED)


@pytest.mark.parametrize("mask", ["padding", "padding_causal", "padding_causal_bottom_right"])
def test_padding_masks_and_cumulative_lengths_are_equivalent(mask, backend, device):
    q, k, v, grad = tensors(device)
    arguments, _ = mask_arguments(mask, device)
    module = DotProductAttention(2, 4, attn_mask_type=mask, attention_type="cross")
    pair = (padding_mask(LENGTHS_Q, 5, device), padding_mask(LENGTHS_KV, 6, device))
    by_lengths = run(module, q, k, v, grad, **arguments)
    by_mask = run(module, q, k, v, grad, attention_mask=pair)
    for one, other in zip((by_lengths[0], *by_lengths[1]), (by_mask[0], *by_mask[1]), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_padding_mask_may_pad_on_the_left(backend, device):
    q, k, v, grad = tensors(device, 6, 6)
    masked = torch.zeros(2, 1, 1, 6, dtype=torch.bool, device=device)
    masked[0, ..., :2] = True
    module = DotProductAttention(2, 4, attn_mask_type="padding")
    got = run(module, q, k, v, grad, attention_mask=masked)
    assert_same(got, oracle_results(q, k, v, grad, lambda b, i, j: b == 1 or (i >= 2 and j >= 2)))


def test_rows_that_see_nothing_are_zero_with_finite_gradients(backend, device):
    q, k, v, grad = tensors(device)
    masked = torch.ones(1, 1, 5, 6, dtype=torch.bool, device=device)
    module = DotProductAttention(2, 4, attn_mask_type="arbitrary")
    out, gradients, _ = run(module, q, k, v, grad, attention_mask=masked)
    assert not out.any() and not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_is_as_accurate_as_its_rounding(dtype, backend, device):
    q, k, v, grad = (x.to(dtype) for x in tensors(device))
    out, gradients, _ = run(DotProductAttention(2, 4), q, k, v, grad)
    expected, want_gradients, _ = oracle_results(q, k, v, grad, visibility("causal", 5, 6))
    unit = torch.finfo(dtype).eps
    for ours, reference in zip((out, *gradients), (expected, *want_gradients), strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double().cpu(), reference, atol=4 * unit, rtol=4 * unit)


def test_the_scale_is_one_over_the_root_of_the_query_size_unless_given(device):
    q, k, v, grad = tensors(device)
    rule = visibility("causal", 5, 6)
    got = run(DotProductAttention(2, 4, softmax_scale=2.0), q, k, v, grad)
    assert_same(got, oracle_results(q, k, v, grad, rule, scale=2.0))
    assert DotProductAttention(2, (16, 4)).softmax_scale == 0.25


@pytest.mark.parametrize("spelling", ["padding_causal", "padding,causal", "causal,padding"])
def test_three_spellings_of_padding_causal(spelling, device):
    assert DotProductAttention(2, 4, attn_mask_type=spelling).attn_mask_type == "padding_causal"


def test_the_call_overrides_mask_window_and_format(device):
    q, k, v, grad = tensors(device)
    module = DotProductAttention(2, 4, attn_mask_type="causal", qkv_format="sbhd")
    got = run(module, q, k, v, grad, "bshd", attn_mask_type="no_mask", window_size=(1, 1))
    assert_same(got, oracle_results(q, k, v, grad, visibility("no_mask", 5, 6, window=(1, 1))))


@pytest.mark.parametrize("axis", [-3, -2])
def test_packed_queries_keys_values_are_views_of_one_tensor(axis, device):
    q, k, v, _ = tensors(device, 5, 5)
    module = DotProductAttention(2, 4, qkv_format="bshd")
    expected = module(q, k, v)
    torch.testing.assert_close(
        module(qkv_layer=torch.stack((q, k, v), axis), qkv_interleave_dim=axis), expected
    )
    packed_kv = torch.stack((k, v), axis)
    torch.testing.assert_close(module(q, kv_layer=packed_kv, qkv_interleave_dim=axis), expected)


@pytest.mark.parametrize("mask", ["causal", "padding"])
def test_recomputing_the_core_changes_nothing(mask, backend, device):
    q, k, v, grad = tensors(device)
    arguments, _ = mask_arguments(mask, device)
    module = DotProductAttention(2, 4, attn_mask_type=mask, attention_type="cross")
    saved = run(module, q, k, v, grad, **arguments)
    recomputed = run(module, q, k, v, grad, checkpoint_core_attention=True, **arguments)
    for one, other in zip((saved[0], *saved[1]), (recomputed[0], *recomputed[1]), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


class Tracker:
    """Count forks, and draw from a separate generator state."""

    def __init__(self):
        self.forks = 0

    def fork(self, name="model-parallel-rng"):
        self.forks += 1
        return torch.random.fork_rng()


def test_dropout_keeps_the_mean_and_is_off_in_evaluation(backend, device):
    q, k, v, _ = tensors(device, 64, 64, batch=8)
    v = torch.ones_like(v)
    module = DotProductAttention(
        2, 4, attn_mask_type="no_mask", attention_dropout=0.25, qkv_format="bshd"
    )
    torch.manual_seed(0)
    out = module(q, k, v)
    assert out.std() > 0.01
    assert abs(out.mean() - 1.0) < 0.02
    torch.testing.assert_close(module.eval()(q, k, v), torch.ones_like(out))


def test_dropout_gradients_use_the_forward_mask(device):
    q, k, v, _ = (x.double() for x in tensors(device))
    module = DotProductAttention(2, 4, attention_dropout=0.5, qkv_format="bshd")

    def attention(*qkv):
        torch.manual_seed(5)
        with use_backend(attention="reference"):
            return module(*qkv)

    assert torch.autograd.gradcheck(attention, tuple(x[:1].requires_grad_() for x in (q, k, v)))


def test_recomputed_dropout_repeats_its_mask(device):
    q, k, v, grad = tensors(device)
    results = []
    for recompute in (False, True):
        tracker = CudaRNGStatesTracker()
        tracker.add("model-parallel-rng", 1234)
        module = DotProductAttention(
            2, 4, attention_dropout=0.5, get_rng_state_tracker=lambda tracker=tracker: tracker
        )
        results.append(run(module, q, k, v, grad, checkpoint_core_attention=recompute))
    (saved, gradients, _), (recomputed, rest, _) = results
    for one, other in zip((saved, *gradients), (recomputed, *rest), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("sequence_parallel, forks", [(False, 1), (True, 0)])
def test_dropout_runs_in_the_trackers_fork_unless_the_caller_forked(
    sequence_parallel, forks, device
):
    q, k, v, _ = tensors(device)
    tracker = Tracker()
    module = DotProductAttention(
        2,
        4,
        attention_dropout=0.5,
        qkv_format="bshd",
        sequence_parallel=sequence_parallel,
        get_rng_state_tracker=lambda: tracker,
    )
    module(q, k, v)
    assert tracker.forks == forks
    module.eval()(q, k, v)
    assert tracker.forks == forks


def test_autocast_lowers_the_precision_of_inputs_only(device):
    q, k, v, grad = tensors(device)
    bias = torch.zeros(1, 1, 5, 6, device=device)
    arguments = {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": bias}
    with torch.autocast(device.type, dtype=torch.bfloat16):
        got, gradients, _ = run(DotProductAttention(2, 4), q, k, v, grad.bfloat16(), **arguments)
    lowered = [x.bfloat16() for x in (q, k, v, grad)]
    expected, expected_gradients, _ = run(DotProductAttention(2, 4), *lowered, **arguments)
    assert got.dtype == torch.bfloat16 and torch.equal(got, expected)
    for gradient, low in zip(gradients, expected_gradients, strict=True):
        assert torch.equal(gradient, low.float())


@pytest.mark.parametrize("empty", ["tokens", "batch"])
def test_empty_tensors_give_empty_results(empty, device):
    q, k, v, _ = tensors(device)
    q, k, v = (x[:, :0] if empty == "tokens" else x[:0] for x in (q, k, v))
    q.requires_grad_()
    out = DotProductAttention(2, 4, qkv_format="bshd")(q, k, v)
    out.sum().backward()
    assert out.shape == (*q.shape[:2], 8) and q.grad.shape == q.shape


def test_second_derivatives_of_attention_are_rejected():
    attention = DotProductAttention(2, 16)
    q, k, v = (torch.randn(8, 2, 2, 16, requires_grad=True) for _ in range(3))
    (gradient,) = torch.autograd.grad(attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(
        RuntimeError, match="the gradients of DotProductAttention by torch_sdpa have no derivative"
    ):
        gradient.square().sum().backward()
