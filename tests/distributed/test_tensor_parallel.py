"""A column- and a row-parallel layer on two ranks equal one rank, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import run_on_ranks
from transformer_engine.pytorch.distributed import (
    CudaRNGStatesTracker,
    TensorParallel,
    initialize_affine_weight_gpu,
    set_tensor_model_parallel_attributes,
)
from transformer_engine.pytorch.functions.communication import gather_sequence

SIZE, TOKENS, WIDTH, INNER = 2, 6, 4, 8


def _problem():
    generator = torch.Generator().manual_seed(7)
    shapes = ((TOKENS, WIDTH), (INNER, WIDTH), (WIDTH, INNER), (TOKENS, WIDTH))
    return [torch.randn(shape, generator=generator) for shape in shapes]  # x, w1, w2, dy


def _one_rank():
    x, w1, w2, dy = _problem()
    hidden = x @ w1.T
    dhidden = dy @ w2
    return {"y": hidden @ w2.T, "dx": dhidden @ w1, "dw1": dhidden.T @ x, "dw2": dy.T @ hidden}


def _two_layers(column, row, x, w1, w2, dy):
    """y = (x @ w1.T) @ w2.T, w1 split by rows and w2 by columns, and the gradients, as modules do it."""
    x = column.enter_forward(x)
    hidden = row.enter_forward(column.leave_forward(x @ w1.T))
    y = row.leave_forward(hidden @ w2.T)
    dy = row.enter_backward(dy)
    dhidden = column.enter_backward(row.leave_backward(dy @ w2))
    return {
        "y": y,
        "dx": column.leave_backward(dhidden @ w1),
        "dw1": dhidden.T @ x,
        "dw2": dy.T @ hidden,
    }


def _gather_gradient(x, group, index):
    local = x.chunk(SIZE, 0)[index].clone().requires_grad_()
    gathered = gather_sequence(local, group)
    (gathered * (1 + index)).sum().backward()
    return [gathered.detach(), local.grad]


def _parallel(device):
    group, index = dist.group.WORLD, dist.get_rank()
    x, w1, w2, dy = (tensor.to(device) for tensor in _problem())
    w1, w2 = w1.chunk(SIZE, 0)[index], w2.chunk(SIZE, 1)[index]
    results = {"gathered": _gather_gradient(x, group, index)}
    for sequence in (False, True):
        column = TensorParallel("column", group, SIZE, sequence)
        row = TensorParallel("row", group, SIZE, sequence)
        local = (x.chunk(SIZE, 0)[index], dy.chunk(SIZE, 0)[index]) if sequence else (x, dy)
        results[str(sequence)] = _two_layers(column, row, local[0], w1, w2, local[1])
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_on_ranks(_parallel, SIZE, tmp_path_factory.mktemp("tensor_parallel"))


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("name", ["y", "dx"])
def test_tensor_parallel_activations_equal_one_rank(results, sequence, name):
    expected = _one_rank()[name]
    for index, result in enumerate(results):
        share = expected.chunk(SIZE, 0)[index] if sequence else expected
        torch.testing.assert_close(result[str(sequence)][name], share)


@pytest.mark.parametrize("sequence", [False, True])
def test_weight_gradients_are_shards_of_the_one_rank_gradients(results, sequence):
    expected = _one_rank()
    for index, result in enumerate(results):
        torch.testing.assert_close(
            result[str(sequence)]["dw1"], expected["dw1"].chunk(SIZE, 0)[index]
        )
        torch.testing.assert_close(
            result[str(sequence)]["dw2"], expected["dw2"].chunk(SIZE, 1)[index]
        )


def test_a_gathered_sequence_sums_the_gradients_of_all_ranks(results):
    x = _problem()[0]
    for result in results:
        gathered, grad = result["gathered"]
        assert torch.equal(gathered, x) and bool((grad == 1 + 2).all())


@pytest.mark.parametrize("mode", ["column", "row", None])
@pytest.mark.parametrize("sequence", [False, True])
def test_one_rank_needs_no_group_and_changes_nothing(mode, sequence):
    parallel = TensorParallel(mode, None, 1, sequence)
    x = torch.ones(3, 2)
    for step in ("enter_forward", "leave_forward", "enter_backward", "leave_backward"):
        assert getattr(parallel, step)(x) is x


def test_no_mode_means_no_communication():
    parallel = TensorParallel(mode=None, group=None, size=2, sequence=True)
    x = torch.ones(3, 2)
    assert parallel.enter_forward(x) is x and parallel.leave_backward(x) is x


@pytest.mark.parametrize("sequence", [False, True])
def test_a_missing_group_raises_with_the_remedy(sequence):
    with pytest.raises(RuntimeError, match="set_tensor_parallel_group"):
        TensorParallel("row", None, 2, sequence).leave_forward(torch.ones(4, 2))


def test_invalid_settings_are_rejected():
    with pytest.raises(ValueError, match="diagonal"):
        TensorParallel("diagonal")
    with pytest.raises(ValueError, match="tp_size=0"):
        TensorParallel("row", group=None, size=0)


def test_a_parameter_is_marked_once_with_its_split_axis():
    weight = torch.nn.Parameter(torch.empty(4, 2))
    set_tensor_model_parallel_attributes(weight, True, 1, 1)
    assert (weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride) == (
        True,
        1,
        1,
    )
    with pytest.raises(ValueError, match="already"):
        set_tensor_model_parallel_attributes(weight, is_parallel=False, dim=0, stride=1)


def test_initialization_draws_from_the_tracked_state_and_leaves_the_default_one_alone(device):
    tracker = CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 11)
    torch.manual_seed(5)
    expected = torch.rand(4, device=device)
    torch.manual_seed(5)
    weight = torch.nn.Parameter(torch.zeros(4, 2, device=device))
    initialize_affine_weight_gpu(weight, torch.nn.init.normal_, lambda: tracker, partition_dim=1)
    assert weight.partition_dim == 1
    assert torch.equal(torch.rand(4, device=device), expected)
    torch.manual_seed(11)
    assert torch.equal(weight, torch.nn.init.normal_(torch.zeros(4, 2, device=device)))
    plain = torch.zeros(4, 2)
    initialize_affine_weight_gpu(plain, lambda t: t.fill_(2.0), set_tp_attributes=False)
    assert bool((plain == 2.0).all()) and not hasattr(plain, "partition_dim")
