"""newton_schulz returns the orthogonal factor, on one device and with columns sharded over ranks."""

from __future__ import annotations

import pytest
import torch

import transformer_engine.pytorch as te
from tests.distributed.threaded_ranks import run_on_threads
from transformer_engine.pytorch.newton_schulz import (
    CusolverMpCtx,
    get_coefficient_iterator,
    get_coefficients,
    newton_schulz,
)


def orthogonal_factor(x: torch.Tensor) -> torch.Tensor:
    """U V^T of the singular value decomposition, float64."""
    u, _, v = torch.linalg.svd(x.double(), full_matrices=False)
    return u @ v


def conditioned(rows: int, columns: int) -> torch.Tensor:
    """A matrix with singular values between 0.2 and 0.9."""
    u, s, v = torch.linalg.svd(torch.randn(rows, columns, dtype=torch.float64), full_matrices=False)
    return ((u * torch.linspace(0.2, 0.9, len(s), dtype=torch.float64)) @ v).float()


@pytest.mark.parametrize("shape", [(8, 8), (6, 20), (20, 6), (1, 5)])
@pytest.mark.parametrize(
    ("kind", "steps", "tolerance"), [("simple", 20, 1e-4), ("polar_express", 12, 1e-4), ("quintic", 10, 0.5)]
)
def test_it_converges_to_the_orthogonal_factor(shape, kind, steps, tolerance):
    x = conditioned(*shape)
    expected = orthogonal_factor(x)
    made = newton_schulz(x, None, steps, get_coefficients(steps, kind))
    assert made is x
    assert (x.double() - expected).norm(2) <= tolerance * expected.norm(2)


def test_one_iteration_is_the_odd_polynomial():
    x = torch.randn(5, 9)
    a, b, c = 1.5, -0.7, 0.2
    gram = x.double() @ x.double().T
    expected = a * x.double() + (b * gram + c * gram @ gram) @ x.double()
    newton_schulz(x, None, 1, [a, b, c])
    torch.testing.assert_close(x.double(), expected, rtol=1e-4, atol=1e-4)


def test_polar_express_converges_from_small_singular_values():
    value = torch.logspace(-3, 0, 200, dtype=torch.float64)
    for a, b, c in get_coefficients(8, "polar_express"):
        value = a * value + b * value**3 + c * value**5
    assert (value - 1).abs().max() < 0.02


def test_coefficients_repeat_as_their_set_says():
    assert get_coefficients(3) == [get_coefficients(1)[0]] * 3
    express = get_coefficients(10, "polar_express")
    assert express[7:] == [express[7]] * 3 and express[0] != express[1]
    sets = [(1.0, 2.0, 3.0), (4.0, 5.0, 6.0)]
    assert list(get_coefficient_iterator(3, sets)) == [*sets, sets[0]]
    assert list(get_coefficient_iterator(3, sets, "repeat_last")) == [*sets, sets[1]]


def test_columns_sharded_over_ranks_give_the_shards_of_the_result():
    x = conditioned(6, 16)
    whole = newton_schulz(x.clone(), None, 5)

    def on_rank(rank: int) -> torch.Tensor:
        shard = x.chunk(2, dim=1)[rank].contiguous()
        context = CusolverMpCtx(torch.distributed.group.WORLD)
        made = te.newton_schulz(shard, context, 5)
        context.destroy()
        with pytest.raises(RuntimeError, match="destroyed"):
            newton_schulz(shard, context)
        return made

    shards = run_on_threads(on_rank, 2)
    torch.testing.assert_close(torch.cat(shards, dim=1), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("x", "arguments", "message"),
    [
        (torch.ones(2, 2, 2), {}, "contiguous"),
        (torch.ones(2, 2, dtype=torch.float64), {}, "float64"),
        (torch.ones(2, 3).t(), {}, "not contiguous"),
        (torch.ones(2, 2), {"coefficients": [1.0, 2.0]}, "three for each"),
        (torch.ones(2, 2), {"num_iterations": 0}, "num_iterations"),
    ],
)
def test_a_wrong_call_leaves_the_matrix(x, arguments, message):
    before = x.clone()
    with pytest.raises(ValueError, match=message):
        newton_schulz(x, **arguments)
    assert torch.equal(x, before)


def test_sets_that_are_not_included_name_the_list():
    with pytest.raises(NotImplementedError, match="as a list"):
        get_coefficients(2, "cans")
