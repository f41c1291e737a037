"""Layers sharded over two ranks equal the whole layer on one rank, forward and backward."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import run_on_ranks
from tests.support.layers import RECIPES
from transformer_engine.pytorch.module.layernorm_linear import LayerNormLinear
from transformer_engine.pytorch.module.layernorm_mlp import LayerNormMLP
from transformer_engine.pytorch.module.linear import Linear
from transformer_engine.pytorch.quantization import autocast

SIZE, TOKENS, HIDDEN, INNER = 2, 64, 32, 64


def pair(**options):
    """A column-parallel layer with a norm, then a row-parallel one."""
    first = LayerNormLinear(HIDDEN, INNER, parallel_mode="column" if options else None, **options)
    second = Linear(INNER, HIDDEN, parallel_mode="row" if options else None, **options)
    return torch.nn.Sequential(first, second)


def mlp(**options):
    return torch.nn.Sequential(
        LayerNormMLP(HIDDEN, INNER, set_parallel_mode=bool(options), **options)
    )


BUILD = {"pair": pair, "mlp": mlp}
SHARDED = {
    "0.weight": 0,
    "0.bias": 0,
    "1.weight": 1,
    "0.fc1_weight": 0,
    "0.fc1_bias": 0,
    "0.fc2_weight": 1,
}


def whole(kind: str) -> torch.nn.Sequential:
    torch.manual_seed(3)
    model = BUILD[kind](device="cpu")
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)
    return model


def problem():
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(TOKENS, HIDDEN, generator=generator) for _ in range(2)]


def shard(name: str, tensor: torch.Tensor, rank: int) -> torch.Tensor:
    return tensor.chunk(SIZE, dim=SHARDED[name])[rank] if name in SHARDED else tensor


def run(model, x, dy, recipe):
    for _ in range(2):
        model.zero_grad()
        x = x.detach().requires_grad_()
        with autocast(enabled=recipe is not None, recipe=recipe):
            y = model(x)
        y.backward(dy)
    return y.detach(), x.grad, {name: p.grad for name, p in model.named_parameters()}


def sharded(device, kind: str, recipe: str, sequence: bool):
    rank, group = dist.get_rank(), dist.group.WORLD
    reference = whole(kind)
    model = BUILD[kind](device=device, tp_group=group, tp_size=SIZE, sequence_parallel=sequence)
    with torch.no_grad():
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            p.copy_(shard(name, q, rank))
    x, dy = (t.to(device) for t in problem())
    if sequence:
        x, dy = x.chunk(SIZE)[rank].contiguous(), dy.chunk(SIZE)[rank].contiguous()
    y, dx, grads = run(model, x, dy, RECIPES[recipe])
    marked = [n for n, p in model.named_parameters() if getattr(p, "sequence_parallel", False)]
    for name in marked:  # their gradients cover one sequence shard; the user reduces them
        dist.all_reduce(grads[name])
    return {"y": y, "dx": dx, "grads": grads, "marked": marked}


@pytest.mark.parametrize("kind", BUILD)
@pytest.mark.parametrize("recipe", ["none", "current"])
@pytest.mark.parametrize("sequence", [False, True])
def test_tensor_parallel_layers_on_two_ranks_equal_one_rank(kind, recipe, sequence, tmp_path):
    ranks = run_on_ranks(
        functools.partial(sharded, kind=kind, recipe=recipe, sequence=sequence), SIZE, tmp_path
    )
    y, dx, grads = run(whole(kind), *problem(), RECIPES[recipe])
    # Shards are scaled by their own maxima, so quantized results differ within E5M2's two bits; a wrong shard by 1.
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if recipe == "none" else {"rtol": 0.2, "atol": 0.3}
    for rank, got in enumerate(ranks):
        part = (lambda t, r=rank: t.chunk(SIZE)[r]) if sequence else (lambda t: t)
        torch.testing.assert_close(got["y"], part(y), **tolerance)
        torch.testing.assert_close(got["dx"], part(dx), **tolerance)
        for name, grad in got["grads"].items():
            expected = shard(name, grads[name], rank)
            error = (grad - expected).norm() / expected.norm()
            assert float(error) < (1e-4 if recipe == "none" else 0.25), name
        assert bool(got["marked"]) == sequence


@pytest.mark.parametrize("mode, features", [("row", HIDDEN // 2), ("column", HIDDEN)])
def test_a_missing_group_names_the_remedy(mode, features):
    layer = Linear(HIDDEN, HIDDEN, parallel_mode=mode, tp_size=2, device="cpu")
    with pytest.raises(
        RuntimeError, match=r"tp_size=2 .*set_tensor_parallel_group\(group\).*tp_group=group"
    ):
        layer(torch.randn(4, features))


def test_a_missing_group_of_a_fused_column_parallel_layer_names_the_remedy():
    layer = LayerNormLinear(HIDDEN, HIDDEN, parallel_mode="column", tp_size=2, device="cpu")
    with torch.no_grad(), pytest.raises(RuntimeError, match="set_tensor_parallel_group"):
        layer(torch.randn(4, HIDDEN))


def test_parameters_carry_the_axis_they_are_split_along():
    column = Linear(HIDDEN, INNER, parallel_mode="column", tp_size=2, device="cpu")
    row = Linear(INNER, HIDDEN, parallel_mode="row", tp_size=2, device="cpu")
    assert column.weight.shape == (INNER // 2, HIDDEN) and row.weight.shape == (HIDDEN, INNER // 2)
    assert (column.weight.tensor_model_parallel, column.weight.partition_dim) == (True, 0)
    assert (row.weight.tensor_model_parallel, row.weight.partition_dim) == (True, 1)
    assert column.bias.tensor_model_parallel and not hasattr(row.bias, "tensor_model_parallel")


NORM_OUTPUT = {"pair": LayerNormLinear, "mlp": LayerNormMLP}


def with_norm_output(kind: str, x, weights, **options):
    """(norm(x), dx) for a fused layer, from a loss on both results that weighs every token differently."""
    torch.manual_seed(3)
    parallel = {"parallel_mode": "column"} if kind == "pair" else {"set_parallel_mode": True}
    layer = NORM_OUTPUT[kind](
        HIDDEN,
        INNER,
        return_layernorm_output=True,
        **(options | parallel if options.get("tp_group") else options),
    )
    with torch.no_grad():
        for p in layer.parameters():
            p.fill_(0.5)
    x = x.detach().requires_grad_()
    _, normed = layer(x)
    (normed * weights).sum().backward()
    return normed.detach(), x.grad


def run_gathered_norm(device, kind: str):
    rank = dist.get_rank()
    x, weights = (t.to(device) for t in problem())
    options = {
        "tp_group": dist.group.WORLD,
        "tp_size": SIZE,
        "sequence_parallel": True,
        "device": device,
    }
    local = x.chunk(SIZE)[rank].contiguous()
    return with_norm_output(kind, local, weights, return_layernorm_output_gathered=True, **options)


@pytest.mark.parametrize("kind", NORM_OUTPUT)
def test_a_gathered_norm_output_covers_the_sequence_and_sums_the_gradients(kind, tmp_path):
    ranks = run_on_ranks(functools.partial(run_gathered_norm, kind=kind), SIZE, tmp_path)
    normed, dx = with_norm_output(kind, *problem(), device="cpu")
    for rank, (got, gradient) in enumerate(ranks):
        torch.testing.assert_close(got, normed)
        # Every rank's loss weighs the whole sequence, so the gradients of SIZE equal losses add up.
        torch.testing.assert_close(gradient, SIZE * dx.chunk(SIZE)[rank])
