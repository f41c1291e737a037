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
    newton_schulz_tp,
)


def orthogonal_factor(x: torch.Tensor) -> torch.Tensor:
    """U V^T of the singular value decomposition, float64."""
    u, _, v = torch.linalg.svd(x.double(), full_matrices=False)
    return u @ v


def regular_matrix(rows: int, columns: int) -> torch.Tensor:
    """A matrix with singular values between 0.2 and 0.9."""
    u, s, v = torch.linalg.svd(torch.randn(rows, columns, dtype=torch.float64), full_matrices=False)
    return ((u * torch.linspace(0.2, 0.9, len(s), dtype=torch.float64)) @ v).float()


# Distance from the orthogonal factor, relative: the sets with a fixed last polynomial converge, the others stay near 1.
@pytest.mark.parametrize("shape", [(8, 8), (6, 20), (20, 6), (1, 5)])
@pytest.mark.parametrize(
    ("kind", "steps", "tolerance"),
    [
        ("simple", 10, 0.5),
        ("quintic", 5, 0.04),
        ("polar_express", 12, 1e-4),
        ("cans", 12, 0.1),
    ],
)
def test_it_converges_to_the_orthogonal_factor(shape, kind, steps, tolerance):
    x = regular_matrix(*shape)
    expected = orthogonal_factor(x)
    result = newton_schulz(x, None, steps, get_coefficients(steps, kind))
    assert result is x
    assert (x.double() - expected).norm(2) <= tolerance * expected.norm(2)


def test_one_iteration_is_the_odd_polynomial():
    x = torch.randn(5, 9)
    a, b, c = 1.5, -0.7, 0.2
    gram = x.double() @ x.double().T
    expected = a * x.double() + (b * gram + c * gram @ gram) @ x.double()
    newton_schulz(x, None, 1, [a, b, c])
    torch.testing.assert_close(x.double(), expected, rtol=1e-4, atol=1e-4)


# Not "aol", which is for matrices that its own scaling has divided: near 0.87 its first polynomial changes the sign.
@pytest.mark.parametrize(
    ("kind", "steps", "smallest", "largest", "error"),
    [
        ("simple", 5, 0.1, 0.9, 0.33),
        ("quintic", 5, 0.1, 0.9, 0.04),
        ("polar_express", 8, 1e-3, 1.0, 1e-3),
        ("cans", 5, 0.1, 0.9, 0.12),
    ],
)
def test_coefficients_move_singular_values_to_one(kind, steps, smallest, largest, error):
    value = torch.linspace(smallest, largest, 500, dtype=torch.float64)
    for a, b, c in get_coefficients(steps, kind):
        value = a * value + b * value**3 + c * value**5
    assert (value - 1).abs().max() < error


# Published largest |X Xᵀ - I| per coefficient set, float32 64 x 64, singular values from 0.1 to 0.9.
ORTHOGONALITY = [
    ("simple", 5, 0.24),
    ("quintic", 5, 0.018),
    ("polar_express", 5, 0.105),
    ("cans", 5, 0.066),
    ("aol", 5, 0.69),
    ("polar_express", 8, 5e-7),
    ("aol", 8, 0.018),
    ("quintic", 8, 0.39),
]


@pytest.mark.parametrize(("kind", "steps", "is_known"), ORTHOGONALITY)
def test_sets_reach_their_known_orthogonality(kind, steps, is_known):
    largest = []
    for seed in range(3):  # the figure depends on the singular vectors
        generator = torch.Generator().manual_seed(seed)
        left, right = torch.linalg.qr(
            torch.randn(2, 64, 64, generator=generator, dtype=torch.float64)
        ).Q
        x = ((left * torch.linspace(0.1, 0.9, 64, dtype=torch.float64)) @ right.T).float()
        newton_schulz(x, None, steps, get_coefficients(steps, kind))
        largest.append((x @ x.T - torch.eye(64)).abs().max().item())
    assert is_known / 1.6 < sum(largest) / len(largest) < 1.6 * is_known


@pytest.mark.parametrize("shape", [(64, 33), (1, 7), (64, 64)])
@pytest.mark.parametrize("steps", [5, 10])
@pytest.mark.parametrize("kind", ["polar_express", "quintic", "simple", "aol"])
def test_bfloat16_iterations_stay_bounded(shape, steps, kind):
    x = torch.randn(shape)
    y = newton_schulz((x / x.norm()).bfloat16(), None, steps, get_coefficients(steps, kind))
    assert torch.linalg.svdvals(y.float()).max() < 1.5


def test_coefficients_repeat_as_their_set_says():
    assert get_coefficients(3, "simple") == [get_coefficients(1, "simple")[0]] * 3
    quintic = get_coefficients(7)
    assert quintic[5:] == quintic[:2] and len(set(quintic)) == 5
    express = get_coefficients(10, "polar_express")
    assert express[7:] == [express[7]] * 3 and express[0] != express[1]
    cans = get_coefficients(7, "cans")
    assert cans[4:] == [cans[4]] * 3
    aol = get_coefficients(5, "aol")
    assert aol[4] == aol[0]
    sets = [(1.0, 2.0, 3.0), (4.0, 5.0, 6.0)]
    assert list(get_coefficient_iterator(3, sets)) == [*sets, sets[0]]
    assert list(get_coefficient_iterator(3, sets, "repeat_last")) == [*sets, sets[1]]


def test_first_coefficients_of_each_set_are_the_published_ones():
    first = {kind: get_coefficients(1, kind)[0] for kind in ("simple", "quintic", "cans", "aol")}
    assert first == {
        "simple": (3.4445, -4.7750, 2.0315),
        "quintic": (4.0848, -6.8946, 2.9270),
        "cans": (8.4703, -25.1081, 18.6293),
        "aol": (4.0098, -7.0585, 2.4635),
    }
    # The published polynomial of The Polar Express, divided by 1.01 to the degree of each term.
    published = (8.28721201814563, -23.595886519098837, 17.300387312530933)
    scaled = [c / 1.01**degree for c, degree in zip(published, (1, 3, 5), strict=True)]
    assert get_coefficients(1, "polar_express")[0] == pytest.approx(scaled, abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_autocast_changes_no_bit(dtype):
    x = regular_matrix(8, 20).to(dtype)
    expected = newton_schulz(x.clone())
    with torch.autocast("cpu", torch.bfloat16):
        result = newton_schulz(x.clone())
    assert torch.equal(result, expected)


def test_columns_sharded_over_ranks_give_the_shards_of_the_result():
    x = regular_matrix(6, 16)
    full = newton_schulz(x.clone(), None, 5)

    def run_rank(rank: int) -> torch.Tensor:
        shard = x.chunk(2, dim=1)[rank].contiguous()
        context = CusolverMpCtx(torch.distributed.group.WORLD)
        result = te.newton_schulz(shard, context, 5)
        with pytest.raises(ValueError, match=r"the whole matrix is \[9, 8\].*newton_schulz_tp"):
            te.newton_schulz(torch.ones(9, 4), context)
        context.destroy()
        with pytest.raises(RuntimeError, match="destroyed"):
            newton_schulz(shard, context)
        return result

    shards = run_on_threads(run_rank, 2)
    torch.testing.assert_close(torch.cat(shards, dim=1), full, rtol=1e-4, atol=1e-5)


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


def test_unknown_set_lists_the_known_ones():
    with pytest.raises(ValueError, match="simple, quintic, polar_express, cans, aol"):
        get_coefficients(2, "cubic")


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (16, 16)])
@pytest.mark.parametrize(
    ("partition_dim", "tp_mode"),
    [
        (None, "duplicated"),
        (0, "duplicated"),
        (1, "duplicated"),
        (0, "distributed"),
        (1, "distributed"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensor_parallel_ranks_have_the_factor_of_the_whole_matrix(
    shape, partition_dim, tp_mode, dtype
):
    ranks = 2
    matrix = regular_matrix(*shape).to(dtype)
    expected = newton_schulz(matrix.clone())
    fits = partition_dim is None or tp_mode == "duplicated" or shape[partition_dim] == max(shape)

    def own(rank: int) -> torch.Tensor:
        return (
            matrix
            if partition_dim is None
            else matrix.chunk(ranks, partition_dim)[rank].contiguous()
        ).clone()

    def step(_: int) -> torch.Tensor | str:
        ctx = CusolverMpCtx(torch.distributed.group.WORLD)
        assert ctx.nranks == ranks
        x = own(ctx.rank)
        try:
            assert newton_schulz_tp(x, ctx, partition_dim=partition_dim, tp_mode=tp_mode) is None
        except ValueError as error:
            return str(error)
        return x

    for rank, actual in enumerate(run_on_threads(step, ranks)):
        if not fits:
            assert "shard the longer dimension" in str(actual)
            continue
        reference = (
            expected if partition_dim is None else expected.chunk(ranks, partition_dim)[rank]
        )
        tolerance = 1e-4 if dtype == torch.float32 else 5e-2
        torch.testing.assert_close(actual, reference, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", [(6, 20), (20, 6)])
@pytest.mark.parametrize("settings", [(None, "duplicated"), (0, "duplicated"), (1, "duplicated")])
def test_one_device_needs_no_context(shape, settings):
    x = regular_matrix(*shape)
    expected = orthogonal_factor(x)
    newton_schulz_tp(x, None, 12, get_coefficients(12, "polar_express"), *settings)
    torch.testing.assert_close(x.double(), expected, rtol=0, atol=1e-5)


def test_tensor_parallel_arguments_are_checked():
    ctx, x = CusolverMpCtx(), regular_matrix(4, 8)
    assert (ctx.nranks, ctx.rank) == (1, 0)
    with pytest.raises(ValueError, match="partition_dim=2; give 0, 1 or None"):
        newton_schulz_tp(x, ctx, partition_dim=2)
    with pytest.raises(ValueError, match="tp_mode='sharded'"):
        newton_schulz_tp(x, ctx, partition_dim=1, tp_mode="sharded")
    with pytest.raises(ValueError, match="coefficients has 3 numbers"):
        newton_schulz_tp(x, ctx, 5, [1.0, 2.0, 3.0])
    before = x.clone()
    newton_schulz_tp(x, ctx, tp_mode="sharded")  # checked only with a partition
    assert torch.equal(x, newton_schulz(before))
    ctx.destroy()
    ctx.destroy()
    with pytest.raises(RuntimeError, match="was destroyed"):
        newton_schulz_tp(x, ctx)
    with pytest.raises(RuntimeError, match="was destroyed"):
        _ = ctx.group


def test_both_module_paths_have_the_names():
    import importlib

    old, new = (
        importlib.import_module(f"transformer_engine.pytorch.{path}newton_schulz")
        for path in ("", "optimizers.")
    )
    for name in new.__all__:
        assert getattr(old, name) is getattr(new, name)
    assert te.newton_schulz_tp is new.newton_schulz_tp
