"""moe_permute and its family: values and gradients against plain PyTorch, quantized tokens, rejected arguments."""

from __future__ import annotations

import pytest
import torch

import transformer_engine.pytorch as te
from tests.support.tolerances import UNIT
from transformer_engine.pytorch import moe_permute, moe_permute_with_probs, moe_unpermute

T, E, K, H = 24, 6, 2, 64


@pytest.fixture
def mask(device) -> torch.Tensor:
    chosen = torch.rand(T, E).topk(K, dim=1).indices
    return torch.zeros(T, E, dtype=torch.int32).scatter_(1, chosen, 1).to(device)


def token_and_expert_indices(mask):
    """Token and expert indices per row."""
    expert, token = mask.t().nonzero(as_tuple=True)
    return token, expert


def leaf(*shape, device, dtype=torch.float32):
    return torch.randn(*shape, device=device).to(dtype).requires_grad_()


def assert_same_gradients(actual, expected, leaves, gradient):
    ours, reference = (torch.autograd.grad(y, leaves, gradient) for y in (actual, expected))
    for own, exact in zip(ours, reference, strict=True):
        torch.testing.assert_close(own, exact)


class TestByMask:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_values_and_gradients_are_those_of_an_index(self, mask, device, dtype):
        x, token = leaf(T, H, device=device, dtype=dtype), token_and_expert_indices(mask)[0]
        y, row_id_map = moe_permute(x, mask, T * K, map_type="mask")
        expected = x[token]
        assert torch.equal(y, expected)
        assert row_id_map.dtype is torch.int32 and row_id_map.shape == (T, 2 * E + 1)
        dy = torch.randn_like(y)
        actual, reference = (torch.autograd.grad(out, x, dy)[0] for out in (y, expected))
        torch.testing.assert_close(actual, reference, rtol=UNIT[dtype], atol=UNIT[dtype])

    def test_the_map_holds_rows_and_experts_from_the_highest_on(self, device):
        routed = torch.tensor([[0, 1, 1], [1, 0, 0], [1, 0, 1], [0, 1, 0]], device=device)
        _, row_id_map = moe_permute(torch.ones(4, 2, device=device), routed, 6)
        lines = [(line[: line[6]], line[3 : 3 + line[6]]) for line in row_id_map.tolist()]
        assert lines == [([4, 2], [2, 1]), ([0], [0]), ([5, 1], [2, 0]), ([3], [1])]

    def test_probabilities_and_their_gradients_follow_the_tokens(self, mask, device):
        x, probs = leaf(T, H, device=device), leaf(T, E, device=device)
        y, row_probs, _ = moe_permute_with_probs(x, probs, mask, T * K)
        token, expert = token_and_expert_indices(mask)
        expected = probs[token, expert]
        assert torch.equal(row_probs, expected) and torch.equal(y, x[token])
        gradient = torch.randn_like(row_probs)
        actual, reference = (
            torch.autograd.grad(out, probs, gradient)[0] for out in (row_probs, expected)
        )
        assert torch.equal(actual, reference)

    def test_a_row_of_probability_zero_is_zero(self, mask, device):
        y, row_probs, _ = moe_permute_with_probs(
            torch.ones(T, H, device=device), torch.zeros(T, E, device=device), mask, T * K
        )
        assert y.abs().sum() == 0 and row_probs.abs().sum() == 0

    @pytest.mark.parametrize("merges", [False, True])
    def test_unpermute_adds_up_weighted_rows_and_its_gradients_are_those_of_the_sum(
        self, mask, device, merges
    ):
        y, probs = leaf(T * K, H, device=device), leaf(T, E, device=device)
        _, row_id_map = moe_permute(torch.zeros(T, H, device=device), mask, T * K)
        token, expert = token_and_expert_indices(mask)
        weighted = y * probs[token, expert][:, None] if merges else y
        expected = torch.zeros(T, H, device=device).index_add(0, token, weighted)
        actual = moe_unpermute(y, row_id_map, probs if merges else None, torch.Size((T, H)))
        torch.testing.assert_close(actual, expected)
        dx, leaves = torch.randn_like(actual), [y, probs][: 1 + merges]
        assert_same_gradients(actual, expected, leaves, dx)

    def test_gradients_are_those_of_finite_differences(self, mask):
        x = torch.randn(T, 4, dtype=torch.float64, requires_grad=True)
        probs = torch.rand(T, E, dtype=torch.float64, requires_grad=True)

        def there_and_back(x, probs):
            y, row_probs, row_id_map = moe_permute_with_probs(x, probs, mask.cpu(), T * K)
            return moe_unpermute(y * row_probs[:, None] + y.tanh(), row_id_map, probs)

        assert torch.autograd.gradcheck(there_and_back, (x, probs), fast_mode=True)

    def test_without_num_out_tokens_the_ones_are_counted(self, mask, device):
        assert moe_permute(torch.ones(T, H, device=device), mask)[0].shape == (T * K, H)

    def test_rows_that_nothing_is_sent_to_are_zero(self, mask, device):
        y, row_id_map = moe_permute(leaf(T, H, device=device), mask, T * K + 5)
        assert y[T * K :].abs().sum() == 0
        y = leaf(T * K + 5, H, device=device)
        moe_unpermute(y, row_id_map).sum().backward()
        assert (
            y.grad is not None and y.grad[T * K :].abs().sum() == 0 and (y.grad[: T * K] == 1).all()
        )

    def test_tokens_of_no_expert_are_zero_and_get_no_gradient(self, mask, device):
        mask[3] = 0
        x = leaf(T, H, device=device)
        y, row_id_map = moe_permute(x, mask)
        back = moe_unpermute(y, row_id_map)
        back.sum().backward()
        assert back[3].abs().sum() == 0 and x.grad is not None and x.grad[3].abs().sum() == 0

    def test_no_tokens_give_no_rows(self, device):
        x, probs = leaf(0, H, device=device), leaf(0, E, device=device)
        mask = torch.zeros(0, E, dtype=torch.int32, device=device)
        y, row_probs, row_id_map = moe_permute_with_probs(x, probs, mask, 0)
        assert y.shape == (0, H) and row_probs.shape == (0,)
        (moe_unpermute(y, row_id_map).sum() + row_probs.sum()).backward()
        assert x.grad is not None and probs.grad is not None and probs.grad.shape == (0, E)


class TestPadding:
    def test_rows_of_each_expert_are_aligned_by_zeros_and_come_back(self, mask, device):
        x, probs, counts = leaf(T, H, device=device), leaf(T, E, device=device), mask.sum(0)
        result = te.moe_permute_and_pad_with_probs(x, probs, mask, counts, 16)
        y, row_probs, row_id_map, pad_offsets, target = result
        assert torch.equal(target, (counts + 15) // 16 * 16) and y.shape[0] == int(target.sum())
        plain, plain_probs, _ = moe_permute_with_probs(x, probs, mask, T * K)
        pieces = zip(y.split(target.tolist()), plain.split(counts.tolist()), strict=True)
        for padded, rows in pieces:
            assert torch.equal(padded[: rows.shape[0]], rows)
            assert padded[rows.shape[0] :].abs().sum() == 0
        assert row_probs.sum().isclose(plain_probs.sum())
        back = moe_unpermute(y, row_id_map, probs, pad_offsets=pad_offsets)
        expected = moe_unpermute(plain, moe_permute(x, mask)[1], probs)
        torch.testing.assert_close(back, expected)
        dx = torch.randn_like(back)
        assert_same_gradients(back, expected, (x, probs), dx)

    def test_nothing_is_padded_where_all_experts_are_aligned(self, device):
        mask = torch.ones(8, 3, dtype=torch.bool, device=device)
        x, probs = torch.ones(8, H, device=device), torch.ones(8, 3, device=device)
        result = te.moe_permute_and_pad_with_probs(x, probs, mask, mask.sum(0), 8)
        assert result[3] is None and result[0].shape == (24, H)

    def test_offsets_add_up_the_padding_of_the_experts_before(self, device):
        mask = torch.tensor([[1, 1], [1, 0], [1, 0]], device=device)
        result = te.moe_permute_and_pad_with_probs(
            torch.ones(3, 2, device=device), mask.float(), mask, mask.sum(0), 4
        )
        assert (
            result[3] is not None and result[3].tolist() == [0, 1] and result[4].tolist() == [4, 4]
        )
        assert result[0].abs().sum(1).bool().tolist() == [True] * 3 + [False, True] + [False] * 3

    def test_a_padded_row_of_probability_zero_is_zero_with_a_gradient(self, device):
        x, probs = leaf(2, 3, device=device), torch.tensor([[0.0], [0.5]], device=device)
        mask = torch.ones(2, 1, dtype=torch.int32, device=device)
        y, _, _ = moe_permute_with_probs(x, probs, mask, 2)
        y.sum().backward()
        assert y[0].tolist() == [0.0] * 3 and torch.equal(y[1], x[1])
        assert x.grad is not None and x.grad.tolist() == [[1.0] * 3] * 2


class TestByIndex:
    def test_values_and_gradients_are_those_of_a_stable_sort(self, device):
        experts = torch.rand(T, E).topk(K, dim=1).indices.int().to(device)
        x, probs = leaf(T, H, device=device), leaf(T, K, device=device)
        y, row_id_map = moe_permute(x, experts, map_type="index")
        token = experts.reshape(-1).sort(stable=True).indices // K
        assert torch.equal(y, x[token])
        assert row_id_map.shape == (T * K,)
        back = moe_unpermute(y, row_id_map, probs, map_type="index")
        expected = (probs.sum(1, keepdim=True)) * x
        torch.testing.assert_close(back, expected)
        dx = torch.randn_like(back)
        assert_same_gradients(back, expected, (x, probs), dx)

    def test_rows_beyond_the_last_are_dropped(self, device):
        experts = torch.tensor([[1, 0], [0, 1]], dtype=torch.int32, device=device)
        x = torch.tensor([[1.0], [2.0]], device=device)
        y, row_id_map = moe_permute(x, experts, 3, map_type="index")
        assert y.flatten().tolist() == [1.0, 2.0, 1.0] and row_id_map.tolist() == [2, 1, 0, -1]
        ones = torch.ones(2, 2, device=device)
        assert moe_unpermute(y, row_id_map, ones, map_type="index").flatten().tolist() == [2.0, 2.0]

    def test_without_probs_the_shape_of_the_tokens_sets_the_rows_per_sum(self, device):
        x = torch.tensor([[1.0], [2.0], [3.0]], device=device)
        experts = torch.tensor([[0, 1], [1, 0], [0, 1]], dtype=torch.int32, device=device)
        y, row_id_map = moe_permute(x, experts, map_type="index")
        back = moe_unpermute(y, row_id_map, restore_shape=(3, 1), map_type="index")
        assert back.flatten().tolist() == [2.0, 4.0, 6.0]
        assert moe_unpermute(y, row_id_map, map_type="index").shape == (6, 1)

    def test_other_integers_are_converted_with_a_warning(self, device):
        experts = torch.zeros(T, 1, dtype=torch.int64, device=device)
        with pytest.warns(UserWarning, match="routing_map is torch.int64; by index it is int32"):
            moe_permute(torch.ones(T, H, device=device), experts, map_type="index")

    @pytest.mark.parametrize("argument", [-1, 7, 9, 12])
    def test_routes_to_expert_minus_one_are_dropped(self, argument, device):
        experts = torch.tensor(
            [[0, 1], [2, -1], [3, 0], [-1, -1], [1, 2], [-1, 3]], dtype=torch.int32
        )
        x = torch.randn(6, 8, device=device, requires_grad=True)
        y, row_id_map = moe_permute(x, experts.to(device), argument, map_type="index")
        routes = [(e, t) for t in range(6) for e in experts[t].tolist() if e >= 0]
        tokens = [t for _, t in sorted(routes)]
        rows = 12 if argument < 0 else argument
        assert y.shape == (rows, 8)
        assert torch.equal(y[: len(tokens)], x[tokens[:rows]]) and not y[len(tokens) :].any()
        if rows < len(tokens):
            return
        probs = torch.rand(6, 2, device=device, requires_grad=True)
        merged = moe_unpermute(y, row_id_map, probs, map_type="index")
        expected = x * (probs * (experts >= 0).to(device)).sum(1, keepdim=True)
        torch.testing.assert_close(merged, expected)
        g = torch.randn_like(merged)
        ours = torch.autograd.grad(merged, (x, probs), g, retain_graph=True)
        for actual, reference in zip(
            ours, torch.autograd.grad(expected, (x, probs), g), strict=True
        ):
            torch.testing.assert_close(actual, reference)


class TestChunks:
    def test_chunks_come_in_their_new_order_and_back(self, device):
        splits, order = (torch.tensor(n, device=device) for n in ([2, 1, 3, 0], [2, 0, 3, 1]))
        x, probs = leaf(6, H, device=device), leaf(6, device=device)
        y, moved = te.moe_sort_chunks_by_index_with_probs(x, probs, splits, order)
        rows = [3, 4, 5, 0, 1, 2]
        assert torch.equal(y, x[rows]) and torch.equal(moved, probs[rows])
        assert torch.equal(te.moe_sort_chunks_by_index(x, splits, order), y)
        dy, dmoved = torch.randn_like(y), torch.randn_like(moved)
        dx, dprobs = torch.autograd.grad((y, moved), (x, probs), (dy, dmoved))
        assert torch.equal(dx[rows], dy) and torch.equal(dprobs[rows], dmoved)


QUANTIZERS = {
    "float8": lambda: te.Float8CurrentScalingQuantizer(
        te.DType.kFloat8E4M3, device=torch.device("cpu")
    ),
    "mxfp8": lambda: te.MXFP8Quantizer(te.DType.kFloat8E4M3),
    "block": lambda: te.Float8BlockQuantizer(
        te.DType.kFloat8E4M3, rowwise=True, columnwise=True, block_scaling_dim=1
    ),
    "nvfp4": lambda: te.NVFP4Quantizer(),
}


class TestQuantizedTokens:
    @pytest.mark.parametrize("name", QUANTIZERS)
    def test_the_rows_of_codes_are_those_of_the_values(self, name):
        mask = torch.zeros(32, E, dtype=torch.int32).scatter_(
            1, torch.rand(32, E).topk(K, 1).indices, 1
        )
        codes = QUANTIZERS[name]()(torch.randn(32, 256) * torch.logspace(-2, 2, 32)[:, None])
        y, row_id_map = moe_permute(codes, mask, 32 * K + 16)
        assert type(y) is type(codes)
        values, expected = y.dequantize(), codes.dequantize()[token_and_expert_indices(mask)[0]]
        assert torch.equal(values[: 32 * K], expected)
        assert values[32 * K :].abs().sum() == 0
        assert torch.equal(row_id_map, moe_permute(codes.dequantize(), mask, 32 * K + 16)[1])

    @pytest.mark.parametrize("name", sorted(QUANTIZERS))
    def test_scales_of_blocks_have_exactly_the_rows(self, name):
        mask = torch.zeros(32, E, dtype=torch.int32).scatter_(
            1, torch.rand(32, E).topk(K, 1).indices, 1
        )
        codes = QUANTIZERS[name]()(torch.randn(32, 256))
        rows = 32 * K + 1
        y, _ = moe_permute(codes, mask, rows)
        scale = getattr(y, "_rowwise_scale_inv", None)
        if scale is None:
            assert y._scale_inv.numel() == 1
            return
        along = 1 if isinstance(y, te.Float8BlockwiseQTensor) else 0
        assert scale.shape[along] == rows and scale.is_contiguous()
        if not isinstance(y, te.NVFP4Tensor):
            plain = y.dequantize()
            got = te.cpp_extensions.general_gemm(torch.eye(256), plain)[0]
            assert torch.equal(got, plain)

    def test_chunks_of_codes_are_those_of_the_values(self):
        codes = QUANTIZERS["float8"]()(torch.randn(32, 64))
        splits, order = torch.tensor([8, 24]), torch.tensor([1, 0])
        moved = te.moe_sort_chunks_by_index(codes, splits, order)
        assert torch.equal(moved.dequantize(), codes.dequantize().roll(-8, 0))

    def test_square_blocks_of_codes_are_rejected(self):
        quantizer = te.Float8BlockQuantizer(
            te.DType.kFloat8E4M3, rowwise=True, columnwise=False, block_scaling_dim=2
        )
        codes = quantizer(torch.randn(128, 128))
        with pytest.raises(
            ValueError, match=r"128 rows of .* share a scale; quantize it in blocks of one row"
        ):
            moe_permute(codes, torch.ones(128, 2, dtype=torch.int32), 256)

    def test_codes_are_not_added_up(self):
        codes = QUANTIZERS["float8"]()(torch.randn(32, 64))
        with pytest.raises(TypeError, match=r"cannot be added up; dequantize\(\) it"):
            moe_unpermute(codes, torch.zeros(32, 3, dtype=torch.int32))


X, MASK = torch.ones(4, 8), torch.ones(4, 2, dtype=torch.int32)
MAP = torch.zeros(4, 5, dtype=torch.int32)
REJECTED = {
    "map type": (
        lambda: moe_permute(X, MASK, 8, map_type="list"),
        ValueError,
        "choose one of mask, index",
    ),
    "map shape": (
        lambda: moe_permute(X, MASK[:3], 8),
        ValueError,
        r"routing_map is \[3, 2\] for 4 tokens",
    ),
    "negative": (lambda: moe_permute(X, MASK, -2), ValueError, "num_out_tokens=-2 is below -1"),
    "too few": (
        lambda: moe_permute(X, MASK, 7),
        ValueError,
        "num_out_tokens=7 < 8, the ones of routing_map",
    ),
    "tokens": (
        lambda: moe_permute(X[None], MASK, 8),
        ValueError,
        r"inp is \[1, 4, 8\]; give tokens \[T, H\]",
    ),
    "probs": (
        lambda: moe_permute_with_probs(X, torch.ones(4, 3), MASK, 8),
        ValueError,
        r"probs is \[4, 3\]; give \[4, 2\]",
    ),
    "both names": (
        lambda: moe_unpermute(X, MAP, torch.ones(4, 2), probs=torch.ones(4, 2)),
        ValueError,
        "give one of them",
    ),
    "restore shape": (
        lambda: moe_unpermute(X, MAP, restore_shape=(5, 8)),
        ValueError,
        r"restore_shape=\(5, 8\) is not that of the tokens, \(4, 8\)",
    ),
    "an expert below -1": (
        lambda: moe_permute(X, MASK - 3, map_type="index"),
        ValueError,
        "routing_map holds expert -2; by index give experts 0, 1",
    ),
    "rows that are not there": (
        lambda: moe_unpermute(X[:3], moe_permute(X, MASK)[1], torch.ones(4, 2)),
        ValueError,
        "row_id_map leads to row 7 of inp, which has 3",
    ),
    "rows by index that are not there": (
        lambda: moe_unpermute(
            X, moe_permute(X, MASK, map_type="index")[1], torch.ones(4, 2), map_type="index"
        ),
        ValueError,
        "row_id_map leads to row 7 of inp, which has 4",
    ),
    "row map": (lambda: moe_unpermute(X, MAP[:, :4]), ValueError, r"by mask it is \[T, 2 E \+ 1\]"),
    "row map dtype": (lambda: moe_unpermute(X, MAP.long()), TypeError, "row_id_map is torch.int64"),
    "division": (
        lambda: moe_unpermute(X, MAP[:, 0][:3], torch.ones(4, 2), map_type="index"),
        ValueError,
        r"row_id_map is \[3\] for 2 experts a token",
    ),
    "no counts": (
        lambda: te.moe_permute_and_pad_with_probs(X, torch.ones(4, 2), MASK, None, 16),
        ValueError,
        "tokens_per_expert is None",
    ),
    "wrong counts": (
        lambda: te.moe_permute_and_pad_with_probs(
            X, torch.ones(4, 2), MASK, torch.tensor([3, 4]), 16
        ),
        ValueError,
        r"tokens_per_expert=\[3, 4\] are not the ones of routing_map, \[4, 4\]",
    ),
    "alignment": (
        lambda: te.moe_permute_and_pad_with_probs(X, torch.ones(4, 2), MASK, MASK.sum(0), 0),
        ValueError,
        "align_size=0 is below 1",
    ),
    "order": (
        lambda: te.moe_sort_chunks_by_index(X, torch.tensor([2, 2]), torch.tensor([0, 0])),
        ValueError,
        "is not an order of 2 chunks",
    ),
    "chunks": (
        lambda: te.moe_sort_chunks_by_index(X, torch.tensor([2, 3]), torch.tensor([0, 1])),
        ValueError,
        "add up to at most the 4 rows",
    ),
}


@pytest.mark.parametrize("name", REJECTED)
def test_invalid_permutation_calls_raise(name):
    call, kind, words = REJECTED[name]
    with pytest.raises(kind, match=words):
        call()


def test_the_former_name_of_merging_probs_warns():
    with pytest.warns(UserWarning, match="probs is called merging_probs now"):
        moe_unpermute(X, MAP, probs=torch.ones(4, 2))


def there_and_back(x, probs, mask):
    y, row_probs, row_id_map = moe_permute_with_probs(x, probs, mask, 2 * T)
    return moe_unpermute(y * row_probs[:, None], row_id_map, probs)


@pytest.mark.parametrize("backend", ["aot_eager"])
def test_permutation_functions_compile_in_one_graph(mask, device, backend):
    x, probs = leaf(T, H, device=device), leaf(T, E, device=device)
    compiled = torch.compile(there_and_back, fullgraph=True, backend=backend)
    actual, expected = compiled(x, probs, mask), there_and_back(x, probs, mask)
    torch.testing.assert_close(actual, expected)
    for own, reference in zip(
        torch.autograd.grad(actual.sum(), (x, probs)),
        torch.autograd.grad(expected.sum(), (x, probs)),
        strict=True,
    ):
        torch.testing.assert_close(own, reference)


@pytest.mark.gpu
def test_a_captured_permutation_replays_with_other_routes(device):
    x, probs = (torch.randn(T, n, device=device) for n in (H, E))
    mask = torch.zeros(T, E, dtype=torch.int32, device=device)
    mask[:, :2] = 1
    there_and_back(x, probs, mask)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = there_and_back(x, probs, mask)
    mask.copy_(mask.roll(3, 1))
    graph.replay()
    torch.testing.assert_close(result, there_and_back(x, probs, mask))


@pytest.mark.gpu
def test_gpu_permutations_are_bitwise_equal_to_cpu(mask):
    x, probs = torch.randn(T, H, dtype=torch.bfloat16), torch.rand(T, E)
    remote = moe_permute_with_probs(x.cuda(), probs.cuda(), mask.cuda(), T * K)
    current = moe_permute_with_probs(x, probs, mask.cpu(), T * K)
    assert torch.equal(remote[0].cpu(), current[0]) and torch.equal(remote[1].cpu(), current[1])
