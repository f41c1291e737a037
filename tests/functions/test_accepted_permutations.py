"""Permutation calls that the original computes: each is accepted and compared with plain indexing."""

from __future__ import annotations

import warnings

import numpy
import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common import warning

T, E, K, H = 6, 3, 2, 8
EXPERTS = torch.tensor([[1, 0], [0, 2], [2, 1], [1, 2], [0, 1], [2, 0]], dtype=torch.int32)
ROUTED = torch.zeros(T, E, dtype=torch.int32).scatter_(1, EXPERTS.long(), 1)
EXPERT_OF, TOKEN_OF = ROUTED.t().nonzero(as_tuple=True)


@pytest.fixture(autouse=True)
def _warnings_start_anew(monkeypatch):
    monkeypatch.setattr(warning, "_issued", set())


def sample(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(0, H), (T, 0), (0, 0)])
@pytest.mark.parametrize("by", ["mask", "index"])
def test_gradients_of_zero_size_inputs_have_their_shape(shape, by):
    tokens = shape[0]
    routing = ROUTED[:tokens] if by == "mask" else EXPERTS[:tokens]
    x, probs = torch.zeros(shape, requires_grad=True), torch.rand(routing.shape).requires_grad_()
    y, rows = te.moe_permute(x, routing, map_type=by)
    back = te.moe_unpermute(y, rows, probs, shape, by)
    (back.sum() + 0 * y.sum()).backward()
    assert x.grad is not None and x.grad.shape == x.shape
    assert torch.equal(probs.grad, torch.zeros_like(probs))


def test_gradients_of_zero_size_inputs_with_probabilities_have_their_shape():
    for tokens in (0, T):
        x, probs = (
            torch.zeros(tokens, 0, requires_grad=True),
            torch.rand(tokens, E).requires_grad_(),
        )
        for function, rest in (
            (te.moe_permute_with_probs, (ROUTED[:tokens], 0)),
            (te.moe_permute_and_pad_with_probs, (ROUTED[:tokens], ROUTED[:tokens].sum(0), 4)),
        ):
            y, row_probs, *_ = function(x, probs, *rest)
            result = torch.autograd.grad(y.sum() + row_probs.sum(), (x, probs))
            assert torch.equal(result[0], torch.zeros_like(x)) and torch.equal(
                result[1], torch.zeros_like(probs)
            )


def test_tokens_without_routes_come_back_as_zeros_with_zero_gradients():
    x, probs = sample(T, H).requires_grad_(), torch.rand(T, E).requires_grad_()
    y, row_probs, rows = te.moe_permute_with_probs(x, probs, torch.zeros_like(ROUTED), 0)
    back = te.moe_unpermute(y, rows, probs, x.shape)
    assert torch.equal(back, torch.zeros_like(x))
    result = torch.autograd.grad(back.sum() + row_probs.sum(), (x, probs))
    assert not result[0].any() and not result[1].any()


@pytest.mark.parametrize(
    "count", [float(T * K), numpy.int64(T * K), torch.tensor(T * K), torch.tensor([float(T * K)])]
)
def test_the_row_count_may_be_a_scalar_from_any_library(count):
    x = sample(T, H)
    assert torch.equal(te.moe_permute(x, ROUTED, count)[0], x[TOKEN_OF])
    assert torch.equal(
        te.moe_permute_with_probs(x, torch.ones(T, E), ROUTED, count)[0], x[TOKEN_OF]
    )


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool]
)
def test_a_routing_mask_may_have_any_dtype(dtype):
    x, probs = sample(T, H).requires_grad_(), torch.rand(T, E)
    y, rows = te.moe_permute(x, ROUTED.to(dtype), T * K)
    assert torch.equal(y, x[TOKEN_OF])
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.full_like(x, K))
    assert torch.equal(
        te.moe_permute_with_probs(x, probs, ROUTED.to(dtype))[1], probs[TOKEN_OF, EXPERT_OF]
    )
    padded = te.moe_permute_and_pad_with_probs(x, probs, ROUTED.to(dtype), ROUTED.sum(0), 1)
    assert torch.equal(padded[0], x[TOKEN_OF])
    assert torch.equal(te.moe_unpermute(y, rows), K * x)


@pytest.mark.filterwarnings("ignore:routing_map is")
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_expert_indices_may_have_any_dtype(dtype):
    x = sample(T, H)
    expected = te.moe_permute(x, EXPERTS, map_type="index")
    for actual, exact in zip(
        te.moe_permute(x, EXPERTS.to(dtype), map_type="index"), expected, strict=True
    ):
        assert torch.equal(actual, exact)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_integers_are_moved_like_tokens(dtype):
    ids = torch.arange(T * H).view(T, H).to(dtype)
    assert torch.equal(te.moe_permute(ids, ROUTED, T * K)[0], ids[TOKEN_OF])
    y, row_ids, _ = te.moe_permute_with_probs(ids, ROUTED.long(), ROUTED, T * K)
    assert torch.equal(y, ids[TOKEN_OF]) and torch.equal(
        row_ids, torch.ones(T * K, dtype=torch.int64)
    )
    expected = torch.cat((ids[2:], ids[:2]))
    assert torch.equal(
        te.moe_sort_chunks_by_index(ids, torch.tensor([2, 4]), torch.tensor([1, 0])), expected
    )


def test_merging_weights_may_be_integers():
    x = sample(T, H)
    y, rows = te.moe_permute(x, ROUTED, T * K)
    torch.testing.assert_close(te.moe_unpermute(y, rows, 3 * ROUTED, x.shape), 3 * K * x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.uint8])
def test_chunk_sizes_may_have_any_integer_dtype(dtype):
    x, probs = sample(T, H), torch.rand(T, 1).requires_grad_()
    sizes, order = torch.tensor([2, 1, 3]), torch.tensor([2, 0, 1])
    y, row_probs = te.moe_sort_chunks_by_index_with_probs(
        x, probs, sizes.to(dtype), order.to(dtype)
    )
    places = torch.tensor([3, 4, 5, 0, 1, 2])
    assert torch.equal(y, x[places]) and torch.equal(row_probs, probs[places, 0])
    gradient = torch.arange(float(T))
    assert torch.equal(torch.autograd.grad(row_probs, probs, gradient)[0][places, 0], gradient)


@pytest.mark.parametrize("align", [4.0, numpy.int32(4), torch.tensor(4)])
def test_token_counts_and_alignment_may_be_floats(align):
    x, probs = sample(T, H), torch.rand(T, E)
    actual = te.moe_permute_and_pad_with_probs(x, probs, ROUTED, ROUTED.sum(0).float(), align)
    expected = te.moe_permute_and_pad_with_probs(x, probs, ROUTED, ROUTED.sum(0), 4)
    for ours, reference in zip(actual, expected, strict=True):
        assert ours is reference is None or torch.equal(ours, reference)


@pytest.mark.parametrize(
    "shape", [[T, H], numpy.array([T, H]), torch.tensor([T, H]), (float(T), H)]
)
def test_the_restored_shape_may_be_any_pair_of_numbers(shape):
    x = sample(T, H)
    y, rows = te.moe_permute(x, ROUTED, T * K)
    assert torch.equal(te.moe_unpermute(y, rows, restore_shape=shape), K * x)


def test_arguments_without_effect_by_index_warn_once():
    x, probs = sample(T, H), torch.full((T, K), 0.5)
    y, rows = te.moe_permute(x, EXPERTS, map_type="index")
    for name, value in (
        ("restore_shape", (T + 1, H)),
        ("pad_offsets", torch.zeros(E, dtype=torch.int64)),
    ):
        with pytest.warns(UserWarning, match=f"{name}.* no effect with map_type='index'"):
            result = te.moe_unpermute(y, rows, probs, map_type="index", **{name: value})
        torch.testing.assert_close(result, x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            te.moe_unpermute(y, rows, probs, map_type="index", **{name: value})


@pytest.mark.parametrize("shape", [5, "ab", (T,), (T, H, 1), None.__class__, (-1, H)])
def test_a_bad_restored_shape_is_named(shape):
    x = sample(T, H)
    y, rows = te.moe_permute(x, ROUTED, T * K)
    with pytest.raises(ValueError, match=r"restore_shape(=|\[0\]=-1)"):
        te.moe_unpermute(y, rows, restore_shape=shape)


@pytest.mark.parametrize("shape", [(T, 0), (T,)])
def test_merging_weights_by_index_without_columns_are_named(shape):
    x = sample(T, H)
    y, rows = te.moe_permute(x, EXPERTS, map_type="index")
    with pytest.raises(ValueError, match=r"merging_probs is \[.*\]; by index give \[T, k\]"):
        te.moe_unpermute(y, rows, torch.ones(shape), map_type="index")


def test_sparse_tensors_are_named():
    x = sample(T, H)
    y, rows = te.moe_permute(x, ROUTED, T * K)
    sizes, order = torch.tensor([2, 4]), torch.tensor([1, 0])
    for name, call in {
        "inp": lambda: te.moe_permute(x.to_sparse(), ROUTED, T * K),
        "routing_map": lambda: te.moe_permute(x, ROUTED.to_sparse(), T * K),
        "probs": lambda: te.moe_permute_with_probs(x, torch.ones(T, E).to_sparse(), ROUTED),
        "row_id_map": lambda: te.moe_unpermute(y, rows.to_sparse()),
        "split_sizes": lambda: te.moe_sort_chunks_by_index(x, sizes.to_sparse(), order),
    }.items():
        with pytest.raises(
            TypeError, match=rf"{name} is a torch.sparse_coo tensor; give a dense one"
        ):
            call()
    with pytest.raises(TypeError, match=r"inp is a torch\.sparse_coo tensor; give a dense one"):
        te.moe_unpermute(y.to_sparse(), rows)
