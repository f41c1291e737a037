"""Cross-entropy steps: the Triton kernels against the float32 reference, and column strips together."""

from __future__ import annotations

import pytest
import torch

from tests.primitives.by_kernels import Kernels
from tests.support.kernels import DEVICE, parametrize_sizes, runs_kernels
from tests.support.tolerances import DTYPES, ROUNDED
from transformer_engine.common.operation_settings import Labels
from transformer_engine.pytorch.primitives import cross_entropy
from transformer_engine.pytorch.primitives.cross_entropy import (
    CrossEntropyRequest,
    cross_entropy_losses,
    cross_entropy_statistics,
    reference,
    triton,
)
from transformer_engine.pytorch.primitives.cross_entropy.reference import count_strips

kernels = Kernels(cross_entropy, "cross_entropy")
SHAPES = parametrize_sizes(
    "shape",
    [(1, 1), (3, 17), (5, 130), (2, 20001)],
    [(4096, 1000), (300, 128256), (8, 262144)],
    ids=str,
)
IGNORED = -100


def sample(shape, dtype, device, smoothing=0.1, first=0, total=None):
    rows, width = shape
    labels = Labels(IGNORED, smoothing, first, width if total is None else total)
    x = (3 * torch.randn(shape, device=device)).to(dtype)
    targets = torch.randint(0, labels.total, (rows,), device=device)
    targets[rows // 2] = IGNORED
    return x, targets, labels


@runs_kernels
@SHAPES
@DTYPES
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_kernels_equal_the_reference_to_the_last_place(shape, dtype, smoothing):
    x, targets, labels = sample(shape, dtype, DEVICE, smoothing)
    partials = kernels.cross_entropy_statistics(x, targets, labels)
    assert partials.shape == (count_strips(*shape), shape[0], 4)
    loss, statistics = kernels.cross_entropy_losses(partials, targets, labels)
    expected, of_rows = reference.losses(reference.statistics(x, targets, labels), targets, labels)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(statistics, of_rows, rtol=1e-5, atol=0.0)
    for factor in (torch.rand(shape[0], device=DEVICE), torch.tensor([0.3], device=DEVICE)):
        expected_value = reference.gradient(x, targets, of_rows, factor, labels, False)
        dx = kernels.cross_entropy_gradient(x, targets, statistics, factor, labels)
        assert dx.dtype == dtype and dx.data_ptr() != x.data_ptr()
        torch.testing.assert_close(
            dx.float(), expected_value.float(), rtol=ROUNDED[dtype], atol=1e-7
        )
        local = x.clone()
        assert (
            kernels.cross_entropy_gradient(local, targets, statistics, factor, labels, True)
            is local
        )
        assert torch.equal(local, dx)


@runs_kernels
def test_infinite_rows_do_not_affect_their_neighbours():
    x, targets, labels = sample((4, 40), torch.float32, DEVICE, 0.0)
    x[0], x[1, 3], targets[1] = float("-inf"), float("inf"), 7
    partials = kernels.cross_entropy_statistics(x, targets, labels)
    loss, statistics = kernels.cross_entropy_losses(partials, targets, labels)
    assert not torch.isfinite(loss[:2]).any()
    torch.testing.assert_close(
        loss[3], torch.nn.functional.cross_entropy(x[3:], targets[3:]), rtol=1e-5, atol=1e-6
    )
    one = torch.ones(1, device=DEVICE)
    dx = kernels.cross_entropy_gradient(x, targets, statistics, one, labels)
    assert torch.isfinite(dx[2:]).all() and (dx[2] == 0).all()


@runs_kernels
@DTYPES
@parametrize_sizes("shape", [(3, 17), (5, 4096)], [(4096, 4099)], ids=str)
def test_a_gradient_is_multiplied_in_place(shape, dtype):
    gradient = torch.randn(shape, device=DEVICE).to(dtype)
    for factor in (1.0, 0.3, 0.0):
        local = gradient.clone()
        assert kernels.cross_entropy_rescaled(local, torch.tensor([factor], device=DEVICE)) is local
        assert torch.equal(
            local, (gradient.float() * torch.tensor(factor, device=DEVICE)).to(dtype)
        )


def test_columns_on_two_ranks_give_the_full_loss_and_gradient(device):
    x, targets, labels = sample((6, 24), torch.float32, device)
    halves = [(x[:, :10].contiguous(), 0), (x[:, 10:].contiguous(), 10)]
    partials = [
        cross_entropy_statistics(part, targets, labels._replace(first=first))
        for part, first in halves
    ]
    loss, statistics = cross_entropy_losses(torch.cat(partials), targets, labels)
    full, of_whole = cross_entropy_losses(
        cross_entropy_statistics(x, targets, labels), targets, labels
    )
    torch.testing.assert_close(loss, full)
    torch.testing.assert_close(statistics, of_whole)
    one = torch.ones(1, device=device)
    parts = [
        cross_entropy.cross_entropy_gradient(
            part, targets, statistics, one, labels._replace(first=first)
        )
        for part, first in halves
    ]
    expected = cross_entropy.cross_entropy_gradient(x, targets, of_whole, one, labels)
    torch.testing.assert_close(torch.cat(parts, dim=1), expected)


def test_few_rows_are_split_into_strips():
    assert [
        count_strips(*shape) for shape in ((8192, 128256), (1024, 128256), (64, 128256), (1, 100))
    ] == [
        1,
        1,
        16,
        1,
    ]
    assert count_strips(1, 1 << 20) == 128


def test_a_tensor_on_the_cpu_is_rejected_with_the_reason():
    labels = Labels(IGNORED, smoothing=0.0, first=0, total=8)
    request = CrossEntropyRequest("statistics", 2, 8, torch.float32, torch.device("cpu"), labels)
    assert "on cpu" in (triton.unsupported_reason(request) or "")
    assert triton.unsupported_reason(request._replace(width=0)) == "the logits are empty"
    assert [v.backend for v in cross_entropy.TABLE.explain(request) if v.chosen] == ["reference"]
