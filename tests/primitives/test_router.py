"""Choosing experts: the reference against autograd through plain PyTorch, the Triton kernels against the reference."""

from __future__ import annotations

import pytest
import torch

from tests.primitives.by_kernels import Kernels, Reference
from tests.support.kernels import DEVICE, parametrize_sizes, runs_kernels
from tests.support.tolerances import CURVED, UNIT
from transformer_engine.pytorch.primitives import router
from transformer_engine.pytorch.primitives.router import (
    BITS,
    BYTES,
    INDICES,
    SIGMOID,
    SOFTMAX,
    SOFTMAX_AFTER,
    SQRTSOFTPLUS,
    Choice,
    reference,
    triton,
)

kernels = Kernels(router, "router")
SCORES = pytest.mark.parametrize("score", [SOFTMAX, SOFTMAX_AFTER, SIGMOID, SQRTSOFTPLUS])
GROUPS = pytest.mark.parametrize("groups", [None, (4, 2)], ids=["any", "groups"])


literal = Reference(router, "router")


def sample_logits(tokens, experts, device="cpu", dtype=torch.float32):
    """Distinct numbers per token, so that no two scores are equal; a few are in softplus's linear range."""
    grid = torch.linspace(-6, 6, experts)
    generator = torch.Generator().manual_seed(0)
    shuffled = torch.stack(
        [grid[torch.randperm(experts, generator=generator)] for _ in range(tokens)]
    )
    shuffled[0] += 18.0
    return shuffled.to(device, dtype)


def plain(x, choice, bias=None):
    """The weights, by the operations that autograd differentiates."""
    scores = {
        SOFTMAX: lambda: x.softmax(1),
        SOFTMAX_AFTER: lambda: x,
        SIGMOID: lambda: x.sigmoid(),
        SQRTSOFTPLUS: lambda: torch.nn.functional.softplus(x).sqrt(),
    }[choice.score]()
    if choice.all_weights:
        return scores if choice.score == SOFTMAX else scores / scores.sum(1, keepdim=True)
    key = scores.detach() if bias is None else scores.detach() + bias
    if choice.groups is not None:
        count, saved = choice.groups
        within = key.unflatten(1, (count, -1))
        best = within.topk(choice.k // saved, 2).values.sum(2).topk(saved, 1).indices
        allowed = torch.zeros_like(key).unflatten(1, (count, -1))
        allowed[torch.arange(x.shape[0])[:, None], best] = 1
        key = key.masked_fill(allowed.flatten(1) == 0, -torch.inf)
    chosen = key.topk(choice.k, 1).indices
    picked = scores.gather(1, chosen)
    if choice.score == SOFTMAX_AFTER:
        picked = picked.softmax(1)
    elif choice.score != SOFTMAX and choice.k > 1:
        picked = picked / picked.sum(1, keepdim=True)
    return torch.zeros_like(x).scatter(1, chosen, picked * choice.scale)


def special_logits(experts, device="cpu"):
    """Rows with NaN, infinities and zeros of both signs among distinct numbers."""
    nan, inf = float("nan"), float("inf")
    rows = [
        {3: nan},
        {0: nan, 5: nan, 9: -nan},
        {2: inf, 7: inf},
        {4: -inf, 5: nan, 6: inf},
        dict.fromkeys(range(experts), -inf),
        dict.fromkeys(range(experts - 1), -inf),
        dict.fromkeys(range(experts), nan),
        dict.fromkeys(range(experts), inf),
        {n: -0.0 if n % 3 else 0.0 for n in range(experts)},
        {n: 1e30 * (-1) ** n for n in range(experts)},
    ]
    x = sample_logits(len(rows), experts)
    for row, changes in zip(x, rows, strict=True):
        for index, value in changes.items():
            row[index] = value
    return x.to(device)


class TestReference:
    @SCORES
    @GROUPS
    @pytest.mark.parametrize("k", [1, 2, 4])
    def test_weights_and_their_gradient_are_those_of_autograd(self, score, groups, k):
        if groups is not None and k % groups[1]:
            groups = (4, 1)
        x = sample_logits(9, 16).requires_grad_()
        bias = torch.linspace(-0.3, 0.3, 16) if score in (SIGMOID, SQRTSOFTPLUS) else None
        choice = Choice(k, score, groups=groups, scale=2.5)
        probs, map, scores = literal.choose(x.detach(), choice, torch.float32, bias)
        expected = plain(x, choice, bias)
        torch.testing.assert_close(probs, expected.detach())
        assert torch.equal(map != 0, expected != 0) and int(map.sum()) == 9 * k
        gradient = torch.randn_like(probs)
        (reference,) = torch.autograd.grad(expected, x, gradient)
        actual = literal.choose_backward(map, scores, gradient, choice, torch.float32)
        torch.testing.assert_close(actual, reference, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("score", [SOFTMAX, SIGMOID, SQRTSOFTPLUS])
    def test_the_scores_of_all_experts_add_up_to_one(self, score):
        x, choice = sample_logits(9, 12).requires_grad_(), Choice(3, score, all_weights=True)
        probs, map, scores = literal.choose(x.detach(), choice, torch.float32)
        expected = plain(x, choice)
        torch.testing.assert_close(probs, expected.detach())
        torch.testing.assert_close(probs.sum(1), torch.ones(9))
        gradient = torch.randn_like(probs)
        (reference,) = torch.autograd.grad(expected, x, gradient)
        torch.testing.assert_close(
            literal.choose_backward(map, scores, gradient, choice, torch.float32),
            reference,
            rtol=1e-5,
            atol=1e-6,
        )

    def test_a_bias_changes_the_choice_and_not_the_weights(self):
        bias = torch.tensor([0.0, 0.0, 0.0, 0.9])
        choice = Choice(2, SIGMOID, scale=2.5)
        probs, _, _ = literal.choose(
            torch.tensor([[2.0, 1.0, 0.0, -1.0]]), choice, torch.float32, bias
        )
        torch.testing.assert_close(
            probs, torch.tensor([[1.91521, 0, 0, 0.58479]]), rtol=0, atol=1e-5
        )

    def test_of_equal_scores_the_lower_number_is_chosen(self):
        indices = torch.zeros(1, 3, dtype=torch.int64)
        literal.choose(
            torch.ones(1, 40), Choice(3, SOFTMAX, map=INDICES), torch.float32, None, indices
        )
        assert indices.tolist() == [[0, 1, 2]]

    def test_bits_are_counted_from_the_lowest(self):
        chosen = torch.zeros(1, 12, dtype=torch.uint8)
        chosen[0, [0, 3, 9]] = 1
        assert reference.pack_bits(chosen).tolist() == [[0x09, 0x02]]

    def test_the_loss_of_even_probabilities(self):
        probs, tokens = torch.full((4, 4), 0.25), torch.tensor([4, 2, 1, 1])
        loss = literal.balance_loss(probs, tokens, 4 * 0.01 / 2, torch.tensor([4]))
        torch.testing.assert_close(loss, torch.tensor([0.01]))


@runs_kernels
class TestKernels:
    @parametrize_sizes(
        "tokens, experts", [(6, 16), (5, 40)], [(4096, 256), (1031, 160), (64, 2048)]
    )
    @SCORES
    @GROUPS
    @pytest.mark.parametrize("map", [BYTES, BITS, INDICES])
    def test_weights_and_gradients_are_those_of_the_reference(
        self, tokens, experts, score, groups, map
    ):
        x = sample_logits(tokens, experts, DEVICE)
        bias = (
            torch.linspace(-0.3, 0.3, experts, device=DEVICE)
            if score in (SIGMOID, SQRTSOFTPLUS)
            else None
        )
        choice = Choice(4, score, groups=groups, scale=1.5, map=map)
        results = [torch.zeros(tokens, 4, dtype=torch.int32, device=DEVICE) for _ in range(2)]
        argument = results if map == INDICES else [None, None]
        ours, reference = (
            by.choose(x, choice, torch.float32, bias, indices)
            for by, indices in zip((kernels, literal), argument, strict=True)
        )
        torch.testing.assert_close(ours[0], reference[0], rtol=CURVED[torch.float32], atol=1e-6)
        torch.testing.assert_close(ours[2], reference[2], rtol=CURVED[torch.float32], atol=1e-6)
        assert torch.equal(*results)
        assert (ours[1] is None) == (reference[1] is None) == (map == INDICES)
        assert ours[1] is None or torch.equal(ours[1], reference[1])
        gradient = torch.randn_like(reference[0])
        read = results[0] if map == INDICES else reference[1]
        actual, expected = (
            by.choose_backward(read, reference[2], gradient, choice, torch.float32)
            for by in (kernels, literal)
        )
        torch.testing.assert_close(actual, expected, rtol=CURVED[torch.float32], atol=2e-6)

    @pytest.mark.parametrize("score", [SOFTMAX, SIGMOID, SQRTSOFTPLUS])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_the_scores_of_all_experts_are_those_of_the_reference(self, score, dtype):
        x, choice = sample_logits(6, 24, DEVICE).to(dtype), Choice(3, score, all_weights=True)
        ours, reference = (by.choose(x, choice, torch.float32) for by in (kernels, literal))
        torch.testing.assert_close(ours[0], reference[0], rtol=CURVED[torch.float32], atol=1e-6)
        gradient = torch.randn_like(reference[0])
        actual, expected = (
            by.choose_backward(reference[1], reference[2], gradient, choice, dtype)
            for by in (kernels, literal)
        )
        torch.testing.assert_close(actual, expected, rtol=UNIT[dtype], atol=UNIT[dtype])

    @pytest.mark.parametrize("experts", [16, 20])
    @SCORES
    @GROUPS
    @pytest.mark.parametrize("map", [BYTES, BITS, INDICES])
    def test_nan_and_infinities_are_chosen_as_by_the_reference(self, experts, score, groups, map):
        x = special_logits(experts)
        bias = None
        if score in (SIGMOID, SQRTSOFTPLUS):
            bias = torch.linspace(-0.3, 0.3, experts)
            bias[2] = float("nan") if map == BITS else float("-inf")
        for k in (1, 4):
            expected = (groups[0], 1) if groups is not None and k == 1 else groups
            choice = Choice(k, score, groups=expected, scale=1.5, map=map)
            results = []
            for by, device in ((kernels, DEVICE), (literal, "cpu")):
                indices = (
                    torch.zeros(len(x), k, dtype=torch.int32, device=device)
                    if map == INDICES
                    else None
                )
                moved = None if bias is None else bias.to(device)
                probs, chosen, saved = by.choose(
                    x.to(device), choice, torch.float32, moved, indices
                )
                read = indices if map == INDICES else chosen
                gradient = torch.linspace(-1, 1, x.numel(), device=device).view(x.shape)
                back = by.choose_backward(read, saved, gradient, choice, torch.float32)
                results.append([t.cpu() for t in (read, probs, saved, back)])
            assert torch.equal(results[0][0], results[1][0])
            for ours, wanted in zip(*(result[1:] for result in results), strict=True):
                close = {"rtol": CURVED[torch.float32], "atol": 2e-6, "equal_nan": True}
                torch.testing.assert_close(ours, wanted, **close)

    @pytest.mark.parametrize("score", [SOFTMAX, SIGMOID, SQRTSOFTPLUS])
    def test_weights_of_all_experts_propagate_nan(self, score):
        x, choice = special_logits(20), Choice(3, score, all_weights=True)
        ours, reference = (
            by.choose(x.to(device), choice, torch.float32)[0].cpu()
            for by, device in ((kernels, DEVICE), (literal, "cpu"))
        )
        torch.testing.assert_close(
            ours, reference, rtol=CURVED[torch.float32], atol=1e-6, equal_nan=True
        )

    def test_small_scores_keep_their_digits(self):
        x = torch.linspace(-40, -1, 16, device=DEVICE)[None]
        ours, reference = (
            by.choose(x, Choice(2, SQRTSOFTPLUS, all_weights=True), torch.float32)
            for by in (kernels, literal)
        )
        torch.testing.assert_close(ours[0], reference[0], rtol=CURVED[torch.float32], atol=0)

    def test_of_equal_scores_the_lower_number_is_chosen(self):
        indices = torch.zeros(2, 3, dtype=torch.int64, device=DEVICE)
        x = torch.ones(2, 40, device=DEVICE)
        x[1, 30] = 2.0
        kernels.choose(x, Choice(3, SOFTMAX, map=INDICES), torch.float32, None, indices)
        assert indices.tolist() == [[0, 1, 2], [30, 0, 1]]

    @parametrize_sizes("rows, columns", [(3, 5), (33, 40)], [(16384, 256), (4096, 2048)])
    @pytest.mark.parametrize("dynamic", [False, True])
    def test_the_loss_is_that_of_the_reference(self, rows, columns, dynamic):
        probs = torch.rand(rows, columns, device=DEVICE)
        tokens = torch.arange(columns, device=DEVICE)
        total = torch.tensor([rows], device=DEVICE) if dynamic else None
        ours, reference = (by.balance_loss(probs, tokens, 0.01, total) for by in (kernels, literal))
        torch.testing.assert_close(ours, reference, rtol=1e-5, atol=0)

    @parametrize_sizes(
        "tokens, experts, k", [(5, 24, 3), (9, 40, 1)], [(16384, 256, 8), (4096, 2048, 4)]
    )
    def test_margins_are_counted_as_by_the_reference(self, tokens, experts, k):
        x = torch.randn(tokens, experts, device=DEVICE)
        bias = torch.linspace(-0.1, 0.1, experts, device=DEVICE)
        bounds = torch.tensor([-0.5, 0.5], device=DEVICE)
        outputs = []
        for by in (kernels, literal):
            histogram = torch.ones(experts, 16, dtype=torch.int32, device=DEVICE)
            by.count_margins(x, bias, k, histogram, bounds)
            outputs.append(histogram)
        assert all(int(histogram.sum()) == experts * (tokens + 16) for histogram in outputs)
        # A margin within rounding of a bin's border may be counted in the adjacent bin.
        assert (outputs[0] - outputs[1]).abs().sum() <= max(2, tokens * experts // 10_000)

    def test_margins_with_nan_and_infinities_are_counted_as_by_the_reference(self):
        x, bias = special_logits(16, DEVICE), torch.linspace(-0.1, 0.1, 16, device=DEVICE)
        outputs = []
        for by in (kernels, literal):
            histogram = torch.zeros(16, 8, dtype=torch.int32, device=DEVICE)
            by.count_margins(x, bias, 2, histogram, torch.tensor([-0.53, 0.51], device=DEVICE))
            outputs.append(histogram)
        assert torch.equal(*outputs)

    def test_nan_margins_count_in_the_first_bin(self):
        x = torch.full((1, 8), float("nan"), device=DEVICE)
        for by in (kernels, literal):
            histogram = torch.zeros(8, 4, dtype=torch.int32, device=DEVICE)
            by.count_margins(
                x, torch.zeros(8, device=DEVICE), 2, histogram, torch.zeros(2, device=DEVICE)
            )
            assert histogram.tolist() == [[1, 0, 0, 0]] * 8


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"shape": (8, 5000)}, "5000 experts > 4096"),
        ({"shape": (1 << 31, 2)}, "it numbers fewer than"),
        ({}, "it needs a CUDA device"),
    ],
)
def test_the_kernels_reject_unsupported_requests(changes, reason):
    request = router.RouterRequest(
        "choose", (8, 4), torch.float32, torch.float32, torch.device("cpu")
    )
    assert reason in triton.unsupported_reason(request._replace(**changes))
