"""Tensor-parallel groups: the ranks that a layer is sharded over, its parameters' marks, and groups that do not fit."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import transformer_engine.pytorch as te
from tests.distributed.threaded_ranks import run_on_threads
from transformer_engine.common import warning
from transformer_engine.common.recipe import Float8CurrentScaling
from transformer_engine.pytorch import distributed

SIZE, HIDDEN, INNER = 2, 32, 64
CPU: dict[str, Any] = {"device": "cpu"}
LAYERS: dict[str, Callable[..., Any]] = {
    "column": lambda **kwargs: te.Linear(HIDDEN, INNER, parallel_mode="column", **CPU, **kwargs),
    "row": lambda **kwargs: te.Linear(INNER, HIDDEN, parallel_mode="row", **CPU, **kwargs),
    "norm": lambda **kwargs: te.LayerNormLinear(
        HIDDEN, INNER, parallel_mode="column", **CPU, **kwargs
    ),
    "mlp": lambda **kwargs: te.LayerNormMLP(HIDDEN, INNER, set_parallel_mode=True, **CPU, **kwargs),
    "grouped": lambda **kwargs: te.GroupedLinear(
        2, HIDDEN, INNER, parallel_mode="column", **CPU, **kwargs
    ),
}


def group_sizes(layer: torch.nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in layer.named_parameters()}


def test_a_group_decides_how_many_ranks_share_a_layer():
    def run(rank: int) -> list[bool]:
        group = dist.group.WORLD
        return [
            group_sizes(make(tp_group=group))
            == group_sizes(make(tp_size=SIZE))
            != group_sizes(make())
            for make in LAYERS.values()
        ]

    assert run_on_threads(run, SIZE) == [[True] * len(LAYERS)] * SIZE


def test_a_size_that_contradicts_the_group_is_warned_about_once(monkeypatch):
    monkeypatch.setattr(warning, "_issued", set())

    def run(rank: int) -> torch.Size:
        return LAYERS["column"](tp_group=dist.group.WORLD, tp_size=4).weight.shape

    with pytest.warns(UserWarning, match="tp_size=4 has no effect: tp_group has 2 ranks"):
        assert run_on_threads(run, SIZE) == [(INNER // SIZE, HIDDEN)] * SIZE
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_on_threads(run, SIZE)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_group_of_another_size_is_an_error_on_every_rank(kind):
    def run(rank: int) -> bool:
        layer = LAYERS[kind](tp_size=4)
        with pytest.raises(ValueError, match="tp_size=4 ranks, the tensor-parallel group has 2"):
            layer.set_tensor_parallel_group(dist.group.WORLD)
        return layer.tp_group is None

    assert run_on_threads(run, SIZE) == [True] * SIZE


def test_rows_that_the_ranks_cannot_share_are_an_error_on_every_rank_that_names_the_padding():
    def run(rank: int) -> tuple[int, ...]:
        layer = LAYERS["row"](tp_group=dist.group.WORLD, sequence_parallel=True)
        with pytest.raises(
            ValueError, match=r"scatters 7 rows over tp_size=2 .* so that there are 8 rows"
        ):
            layer(torch.ones(7, INNER // SIZE))
        return tuple(layer(torch.ones(8, INNER // SIZE)).shape)  # no rank waits for another

    assert run_on_threads(run, SIZE) == [(4, HIDDEN)] * SIZE


def test_experts_sharded_over_ranks_equal_whole_experts():
    generator = torch.Generator().manual_seed(5)
    x, dy = (
        torch.randn(10, HIDDEN, generator=generator),
        torch.randn(10, INNER, generator=generator),
    )
    weights = torch.randn(2, INNER, HIDDEN, generator=generator)
    rows = [3, 7]

    def step(layer: Any, x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x.clone().requires_grad_()
        y = layer(x, rows)
        y.backward(dy)
        return y.detach(), x.grad, layer.weight0.grad, layer.weight1.grad  # pyright: ignore[reportReturnType]

    def create(weights: torch.Tensor, **kwargs: Any) -> torch.nn.Module:
        layer = te.GroupedLinear(2, HIDDEN, INNER, bias=False, **CPU, **kwargs)
        with torch.no_grad():
            for i, weight in enumerate(weights):
                layer.get_parameter(f"weight{i}").copy_(weight)
        return layer

    def run(rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        options: dict[str, Any] = {"tp_group": dist.group.WORLD, "sequence_parallel": True}
        column = create(weights.chunk(SIZE, 1)[rank], parallel_mode="column", **options)
        by_columns = [*step(column, x, dy.chunk(SIZE, 1)[rank])]
        dist.all_reduce(by_columns[1])  # the layer does not communicate
        row = create(weights.chunk(SIZE, 2)[rank], parallel_mode="row", **options)
        by_rows = [*step(row, x.chunk(SIZE, 1)[rank], dy)]
        dist.all_reduce(by_rows[0])
        return by_columns, by_rows

    full = step(create(weights), x, dy)
    for rank, (by_columns, by_rows) in enumerate(run_on_threads(run, SIZE)):
        shards = [
            full[0].chunk(SIZE, 1)[rank],
            full[1],
            *[w.chunk(SIZE, 0)[rank] for w in full[2:]],
        ]
        torch.testing.assert_close(by_columns, shards)
        shards = [full[0], *[w.chunk(SIZE, 1)[rank] for w in full[1:]]]
        torch.testing.assert_close(by_rows, shards)


# Of the parameters of sharded layers with sequence parallelism: (partition_dim, or None where not sharded).
MARKS = {
    "column": {"weight": 0, "bias": 0},
    "row": {"weight": 1, "bias": None},
    "norm": {"layer_norm_weight": None, "layer_norm_bias": None, "weight": 0, "bias": 0},
    "mlp": {
        "layer_norm_weight": None,
        "layer_norm_bias": None,
        "fc1_weight": 0,
        "fc1_bias": 0,
        "fc2_weight": 1,
        "fc2_bias": None,
    },
    "grouped": {"weight0": 0, "weight1": 0, "bias0": 0, "bias1": 0},
}


@pytest.mark.parametrize("kind", LAYERS)
def test_parameters_carry_the_marks_that_megatron_reads(kind):
    layer = LAYERS[kind](tp_size=SIZE, sequence_parallel=True)
    assert {name for name, _ in layer.named_parameters()} == set(MARKS[kind])
    for name, parameter in layer.named_parameters():
        dim = MARKS[kind][name]
        if dim is None:  # each rank sees its sequence shard: Megatron reduces the gradient
            assert getattr(parameter, "sequence_parallel", False)
            assert not getattr(parameter, "tensor_model_parallel", False)
        else:
            names = ("tensor_model_parallel", "partition_dim", "partition_stride")
            assert [getattr(parameter, mark) for mark in names] == [True, dim, 1]
            assert not getattr(parameter, "sequence_parallel", False)
    assert (layer.tp_size, layer.tp_group, layer.sequence_parallel) == (SIZE, None, True)
    assert callable(layer.backward_dw) and not layer.need_backward_dw()
    for name in ("set_tensor_parallel_group", "register_wgrad_accumulation_and_reduce_hooks"):
        assert callable(getattr(layer, name))


def test_ranks_share_the_elements_of_a_tensor_and_gather_them():
    def run(rank: int) -> tuple[torch.Tensor, bool, bool]:
        full, group = torch.arange(12.0).view(3, 4), dist.group.WORLD
        local = distributed.split_tensor_into_1d_equal_chunks(full, group)
        copy = distributed.split_tensor_into_1d_equal_chunks(full, group, new_buffer=True)
        with pytest.raises(ValueError, match="pad it to 6"):
            distributed.split_tensor_into_1d_equal_chunks(torch.ones(5), group)
        shared = local.untyped_storage().data_ptr() == full.untyped_storage().data_ptr()
        assert torch.equal(copy, local) and copy.untyped_storage().nbytes() == 6 * 4
        gathered = distributed.gather_split_1d_tensor(local, group)
        return local.clone(), shared, torch.equal(gathered, full.view(-1))

    first, second = run_on_threads(run, SIZE)
    assert torch.equal(torch.cat((first[0], second[0])), torch.arange(12.0))
    assert first[1:] == second[1:] == (True, True)


def test_a_random_state_is_graph_safe_where_it_is_a_generator():
    assert distributed.is_graph_safe_rng_state(torch.Generator())
    assert not distributed.is_graph_safe_rng_state(torch.get_rng_state())


def test_all_collectives_of_a_layer_use_its_own_group(monkeypatch):
    groups: list[Any] = []

    def recording(name: str) -> None:
        function = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            groups.append(kwargs.get("group", args[2] if len(args) > 2 else None))
            return function(*args, **kwargs)

        monkeypatch.setattr(dist, name, call)

    def run(rank: int) -> Any:
        group = dist.new_group([0, 1])
        layer = LAYERS["mlp"](tp_group=group, sequence_parallel=True)
        x = torch.ones(64, HIDDEN, requires_grad=True)
        with te.autocast(recipe=Float8CurrentScaling()):
            y = layer(x)
        y.sum().backward()
        return group

    for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"):
        recording(name)
    local = run_on_threads(run, SIZE)
    assert len(groups) >= 12 and all(any(group is actual for actual in local) for group in groups)
