"""Tokens to rows and back: the reference against loops over tokens, the Triton kernels against the reference."""

from __future__ import annotations

import pytest
import torch

from tests.primitives.by_kernels import Kernels, Reference
from tests.support.kernels import DEVICE, INTERPRETED, parametrize_sizes, runs_kernels
from tests.support.tolerances import DTYPES, SUMMED, UNIT
from transformer_engine.pytorch.primitives import permutation
from transformer_engine.pytorch.primitives.permutation import (
    INDEX,
    MASK,
    Routes,
    reference,
    rows_of_indices,
    triton,
)

kernels = Kernels(permutation, "permutation")


literal = Reference(permutation, "permutation")


def sample_mask(tokens, experts, places, device="cpu", seed=0):
    """bool [T, E]: each token is routed to `places` experts, every fifth token to no expert."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(tokens, experts, generator=generator).topk(places, dim=1).indices
    mask = torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, chosen, True)
    mask[::5] = False
    return mask.to(device)


def route_in_a_loop(mask):
    """{(token, expert): row} by a loop."""
    rows = {}
    for expert in range(mask.shape[1]):
        for token in range(mask.shape[0]):
            if mask[token, expert]:
                rows[token, expert] = len(rows)
    return rows


def cells(map, experts):
    """{(token, expert): row} for the nonzero cells in a map."""
    results = {}
    for token, line in enumerate(map.tolist()):
        number = line[2 * experts]
        assert line[:number] == sorted(line[:number], reverse=True)
        results |= {(token, line[experts + j]): line[j] for j in range(number)}
    return results


SHAPES = parametrize_sizes(
    "tokens, experts, places", [(2, 3, 1), (13, 5, 3), (70, 12, 4)], [(4096, 64, 8), (1031, 160, 6)]
)
WIDTHS = parametrize_sizes("hidden", [5, 1100], [4096, 7168, 9000])
TOKENS = 11 if INTERPRETED else 1037


class TestReference:
    def test_rows_go_by_expert_then_by_token(self):
        mask = torch.tensor([[0, 1, 1], [1, 0, 0], [1, 0, 1], [0, 1, 0]])
        map = literal.rows_of_mask(mask)
        assert cells(map, 3) == route_in_a_loop(mask)
        assert [line[:2] for line in map.tolist()] == [[4, 2], [0, -1], [5, 1], [3, -1]]

    def test_rows_by_index_are_a_stable_sort(self):
        experts = torch.tensor([[1, 0], [0, 1]], dtype=torch.int32)
        assert rows_of_indices(experts, 4).tolist() == [2, 1, 0, 3]
        assert rows_of_indices(experts, 3).tolist() == [2, 1, 0, -1]

    def test_chunks_take_their_rows_along_and_others_stay(self):
        splits, order = torch.tensor([2, 1, 3]), torch.tensor([2, 0, 1])
        assert literal.rows_of_chunks(splits, order, 8).tolist() == [3, 4, 5, 0, 1, 2, 6, 7]

    def test_every_row_holds_its_token_and_the_others_zero(self):
        mask = sample_mask(13, 5, 3)
        x, probs = torch.randn(13, 7), torch.rand(13, 5)
        probs[3] = 0.0
        routes = Routes(literal.rows_of_mask(mask), MASK, 13, 5)
        rows = int(mask.sum()) + 4
        y, row_probs = literal.send(x, routes, rows, probs)
        expected, expected_probs = torch.zeros(rows, 7), torch.zeros(rows)
        for (token, expert), row in route_in_a_loop(mask).items():
            expected_probs[row] = probs[token, expert]
            expected[row] = 0.0 if probs[token, expert] == 0 else x[token]
        assert torch.equal(y, expected)
        assert torch.equal(row_probs, expected_probs)

    def test_tokens_are_the_weighted_sums_of_their_rows(self):
        mask, weights = sample_mask(13, 5, 3), torch.rand(13, 5, dtype=torch.float64)
        routes = Routes(literal.rows_of_mask(mask), MASK, 13, 5)
        y = torch.randn(int(mask.sum()), 7, dtype=torch.float64)
        expected = torch.zeros(13, 7, dtype=torch.float64)
        for (token, expert), row in route_in_a_loop(mask).items():
            expected[token] += weights[token, expert] * y[row]
        torch.testing.assert_close(literal.collect(y, routes, weights)[0], expected)


@runs_kernels
class TestKernels:
    @SHAPES
    @pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64])
    def test_the_map_is_that_of_the_reference(self, tokens, experts, places, dtype):
        wide = sample_mask(tokens, 2 * experts, places, DEVICE).to(dtype)
        mask = wide[:, ::2]
        map, expected = kernels.rows_of_mask(mask), literal.rows_of_mask(mask)
        contents = expected >= 0
        assert torch.equal(torch.where(contents, map, -1), expected)

    @parametrize_sizes(
        "tokens, splits", [(20, [2, 0, 1, 3]), (300, [5] * 33)], [(100_000, [311] * 320)]
    )
    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    def test_chunks_are_those_of_the_reference(self, tokens, splits, dtype):
        order = torch.randperm(len(splits), generator=torch.Generator().manual_seed(0))
        arguments = (torch.tensor(splits, dtype=dtype).to(DEVICE), order.to(DEVICE, dtype), tokens)
        assert torch.equal(kernels.rows_of_chunks(*arguments), literal.rows_of_chunks(*arguments))

    @WIDTHS
    @pytest.mark.parametrize("padded", [False, True])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
    def test_sent_rows_are_those_of_the_reference(self, hidden, padded, dtype):
        routes, rows = self.routes(padded)
        x = (torch.randn(TOKENS, hidden, device=DEVICE) * 50).to(dtype)
        probs = torch.rand(TOKENS, 6, device=DEVICE)
        probs[4] = 0.0
        for argument in (None, probs, probs.bfloat16()):
            for actual, wanted in zip(
                kernels.send(x, routes, rows, argument),
                literal.send(x, routes, rows, argument),
                strict=True,
            ):
                assert (actual is None) == (wanted is None)
                assert actual is None or torch.equal(actual, wanted)

    @WIDTHS
    @DTYPES
    @pytest.mark.parametrize("padded", [False, True])
    def test_collected_tokens_are_those_of_the_reference(self, hidden, dtype, padded):
        routes, rows = self.routes(padded)
        y, weights = (
            torch.randn(rows, hidden, device=DEVICE).to(dtype),
            torch.rand(TOKENS, 6, device=DEVICE),
        )
        adjacent = torch.randn(rows, device=DEVICE)
        for arguments in ((), (weights,), (None, adjacent)):
            (x, values), (expected, expected_values) = (
                by.collect(y, routes, *arguments) for by in (kernels, literal)
            )
            torch.testing.assert_close(x, expected, rtol=UNIT[dtype], atol=SUMMED[dtype])
            assert (values is None) == (expected_values is None)
            assert values is None or torch.equal(values, expected_values)

    @WIDTHS
    @DTYPES
    @pytest.mark.parametrize("padded", [False, True])
    def test_the_gradients_of_collected_tokens_are_those_of_the_reference(
        self, hidden, dtype, padded
    ):
        routes, rows = self.routes(padded)
        dx, y = (torch.randn(n, hidden, device=DEVICE).to(dtype) for n in (TOKENS, rows))
        weights = torch.rand(TOKENS, 6, device=DEVICE)
        (dy, dw), (dy_expected, dw_expected) = (
            by.send_weighted(dx, routes, rows, weights, y) for by in (kernels, literal)
        )
        assert torch.equal(dy, dy_expected)
        alone, nothing = kernels.send_weighted(dx, routes, rows, weights, None)
        assert torch.equal(alone, dy) and nothing is None
        scale = hidden**0.5
        torch.testing.assert_close(dw, dw_expected, rtol=SUMMED[torch.float32], atol=scale * 1e-6)

    def test_by_index_dropped_routes_are_left_out(self):
        experts = (
            torch.randint(0, 4, (23, 3), generator=torch.Generator().manual_seed(0))
            .int()
            .to(DEVICE)
        )
        routes = Routes(rows_of_indices(experts, 50), INDEX, 23, 3)
        x, weights = torch.randn(23, 40, device=DEVICE), torch.rand(23, 3, device=DEVICE)
        y = kernels.send(x, routes, 50, every_row=True)[0]
        assert torch.equal(y, literal.send(x, routes, 50)[0])
        actual, reference = (by.collect(y, routes, weights)[0] for by in (kernels, literal))
        torch.testing.assert_close(actual, reference, rtol=1e-6, atol=1e-6)
        for ours, expected in zip(
            kernels.send_weighted(x, routes, 50, weights, y),
            literal.send_weighted(x, routes, 50, weights, y),
            strict=True,
        ):
            torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-5)

    def test_no_kernel_is_launched_for_empty_inputs(self):
        routes = Routes(
            kernels.rows_of_mask(torch.zeros(0, 4, device=DEVICE, dtype=torch.bool)), MASK, 0, 4
        )
        assert kernels.send(torch.ones(0, 8, device=DEVICE), routes, 3)[0].abs().sum() == 0
        assert kernels.collect(torch.ones(3, 8, device=DEVICE), routes)[0].shape == (0, 8)

    @staticmethod
    def routes(padded):
        """Token routes to 6 experts, and the row count, four more than there are routes."""
        mask = sample_mask(TOKENS, 6, 3, DEVICE)
        counts = mask.sum(0)
        pads = (counts + 7) // 8 * 8 - counts
        offsets = (pads.cumsum(0) - pads) if padded else None
        rows = int(counts.sum() + (pads.sum() if padded else 0)) + 4
        return Routes(literal.rows_of_mask(mask), MASK, TOKENS, 6, offsets), rows


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"shape": (8, 5000)}, "5000 experts > 4096"),
        ({"dtype": torch.float32}, "the map is made of torch.float32"),
        ({"shape": (1 << 31, 2)}, "it numbers fewer than"),
        ({}, "it needs a CUDA device"),
    ],
)
def test_the_kernels_reject_unsupported_requests(changes, reason):
    request = permutation.PermutationRequest("map", (8, 4), torch.bool, torch.device("cpu"))
    assert reason in triton.unsupported_reason(request._replace(**changes))


@pytest.mark.skipif(INTERPRETED, reason="the compiler needs no interpreter")
def test_the_reference_compiles():
    def move(x, mask, weights):
        routes = Routes(reference.map_of_mask(mask), MASK, *mask.shape)
        return reference.collect(reference.send(x, routes, 12, None)[0], routes, 12, weights, None)[
            0
        ]

    mask = sample_mask(9, 4, 2)
    arguments = (torch.randn(9, 5), mask, torch.rand(9, 4))
    compiled = torch.compile(move, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*arguments), move(*arguments))
