"""Operations over two processes: tensor and sequence parallelism, and the collectives."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist

import transformer_engine.pytorch as te
from tests.distributed.ranks import run_on_ranks
from tests.support.tolerances import UNIT
from transformer_engine.common.recipe import Float8CurrentScaling, MXFP8BlockScaling
from transformer_engine.pytorch import ops
from transformer_engine.pytorch.quantization import emulate

SIZE, ROWS, HIDDEN, INNER = 2, 128, 64, 128
RECIPES = {"none": None, "current": Float8CurrentScaling(), "mxfp8": MXFP8BlockScaling()}


def problem() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {
        "x": (ROWS, HIDDEN),
        "fc1": (INNER, HIDDEN),
        "b1": (INNER,),
        "fc2": (HIDDEN, INNER),
        "b2": (HIDDEN,),
        "dy": (ROWS, HIDDEN),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def mlp(device: torch.device, parallel: bool, sequence: bool) -> ops.Sequential:
    options = {"device": device, "sequence_parallel": sequence}
    column = {**options, "tensor_parallel_mode": "column"} if parallel else {"device": device}
    row = {**options, "tensor_parallel_mode": "row"} if parallel else {"device": device}
    return ops.Sequential(
        ops.Linear(HIDDEN, INNER, **column), ops.GELU(), ops.Linear(INNER, HIDDEN, **row)
    )


def train(
    chain: ops.Sequential,
    argument: dict[str, torch.Tensor],
    x: torch.Tensor,
    dy: torch.Tensor,
    name: str,
):
    values = [argument[key] for key in ("fc1", "b1", "fc2", "b2")]
    with torch.no_grad():
        for parameter, value in zip(chain.parameters(), values, strict=True):
            parameter.copy_(value)
    leaf = x.clone().requires_grad_()
    recipe = RECIPES[name]
    with emulate(), te.autocast(enabled=recipe is not None, recipe=recipe):
        y = chain(leaf)
    y.backward(dy)
    return {
        "y": y.detach(),
        "dx": leaf.grad,
        "grads": [parameter.grad for parameter in chain.parameters()],
    }


def shards(argument: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """One rank's parameters; a row-parallel layer's bias is the sum over the ranks' biases."""
    result = dict(argument)
    result["fc1"], result["b1"] = (
        argument["fc1"].chunk(SIZE)[rank],
        argument["b1"].chunk(SIZE)[rank],
    )
    result["fc2"], result["b2"] = argument["fc2"].chunk(SIZE, 1)[rank], argument["b2"] / SIZE
    return result


def run_rank(device: torch.device, name: str, sequence: bool):
    rank = dist.get_rank()
    options = {key: value.to(device) for key, value in problem().items()}
    part = (lambda t: t.chunk(SIZE)[rank]) if sequence else (lambda t: t)
    chain = mlp(device, True, sequence)
    return train(chain, shards(options, rank), part(options["x"]), part(options["dy"]), name)


@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
@pytest.mark.parametrize("name", RECIPES)
def test_parallel_chains_equal_one_process(name, sequence, tmp_path):
    argument = problem()
    expected = train(
        mlp(torch.device("cpu"), parallel=False, sequence=False),
        argument,
        argument["x"],
        argument["dy"],
        name,
    )
    # each rank scales its part of a tensor separately
    bound = 1e-5 if name == "none" else UNIT[torch.float8_e5m2]
    ranks = run_on_ranks(functools.partial(run_rank, name=name, sequence=sequence), SIZE, tmp_path)
    for rank, got in enumerate(ranks):
        part = (lambda t, r=rank: t.chunk(SIZE)[r]) if sequence else (lambda t: t)
        reference = shards(
            dict(zip(("fc1", "b1", "fc2", "b2"), expected["grads"], strict=True)), rank
        )
        pairs = [(got["y"], part(expected["y"])), (got["dx"], part(expected["dx"]))]
        pairs += [
            (got["grads"][0], reference["fc1"]),
            (got["grads"][1], reference["b1"]),
            (got["grads"][2], reference["fc2"]),
        ]
        for ours, original in pairs:
            assert ours.shape == original.shape
            assert (ours - original).norm() <= bound * original.norm()


def collectives(device: torch.device):
    rank = dist.get_rank()
    results = {}
    for kind in (ops.AllGather, ops.AllReduce, ops.ReduceScatter):
        x = (torch.arange(8.0, device=device).view(4, 2) + 100 * rank).requires_grad_()
        before = x.detach().clone()
        y = ops.Sequential(kind())(x)
        y.backward(torch.ones_like(y) * (rank + 1))
        assert torch.equal(x.detach(), before)
        results[kind.__name__] = (y.detach(), x.grad)
    # Ranks may differ in their strides, and an extra output keeps the partial sum.
    x = torch.arange(6.0, device=device).view(2, 3)
    x = x if rank else x.t().contiguous().t()
    assert torch.equal(ops.AllReduce()(x), 2 * torch.arange(6.0, device=device).view(2, 3))
    linear = ops.BasicLinear(3, 3, device=device)
    total, partial = ops.Sequential(linear, ops.MakeExtraOutput(), ops.AllReduce())(x)
    assert torch.equal(partial, linear(x)) and not torch.equal(total, partial)
    with pytest.raises(RuntimeError, match="cannot split"):
        ops.ReduceScatter()(torch.ones(3, 2, device=device))
    with pytest.raises(ValueError, match="not divisible"):
        ops.BasicLinear(8, 9, tensor_parallel_mode="column")
    assert ops.Linear(8, 8, tensor_parallel_mode="row", device=device).basic_ops[1].local_size == 8
    return results


# Tensors with one shape and different layouts. The values are integers, whose sums are exact.
LAYOUTS = {
    "contiguous": lambda shape: _integers(shape),
    "expanded": lambda shape: _integers(()).expand(shape),
    "rows expanded": lambda shape: _integers((1, *shape[1:])).expand(shape),
    "transposed": lambda shape: _integers((shape[1], shape[0], *shape[2:])).transpose(0, 1),
    "every second column": lambda shape: _integers((*shape[:-1], 2 * shape[-1]))[..., ::2],
    "column-major": lambda shape: _integers((shape[-1], *shape[:-1])).movedim(0, -1),
}


def _integers(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randint(-8, 8, shape).float()


def _gather(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Tensors from all ranks."""
    parts = [torch.empty(tensor.shape) for _ in range(SIZE)]
    dist.all_gather(parts, tensor.contiguous())
    return parts


def _own_chunk(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.chunk(SIZE)[dist.get_rank()]


# {operation: (row factor, output and input gradient from all ranks' tensors)}
COLLECTIVES = {
    "AllGather": (2.0, torch.cat, lambda dys: _own_chunk(sum(dys))),
    "AllReduce": (1.0, sum, lambda dys: dys[dist.get_rank()]),
    "ReduceScatter": (0.5, lambda xs: _own_chunk(sum(xs)), torch.cat),
}


def collectives_of_layouts(device: torch.device):
    """Compare collectives on tensors in every layout with their definitions."""
    torch.manual_seed(dist.get_rank())
    for name, (factor, output, gradient) in COLLECTIVES.items():
        for shape in ((4, 6, 2), (4, 2), (4, 3, 2, 2)):
            for of_input in LAYOUTS.values():
                for of_gradient in LAYOUTS.values():
                    x = of_input(shape)
                    leaf = x.detach().requires_grad_()
                    op = getattr(ops, name)()
                    y = (ops.Sequential(ops.Identity(), op) if of_gradient is of_input else op)(
                        leaf
                    )
                    assert torch.equal(y, output(_gather(x)))
                    dy = of_gradient((int(shape[0] * factor), *shape[1:]))
                    y.backward(dy)
                    assert leaf.grad is not None and torch.equal(leaf.grad, gradient(_gather(dy)))
    return True


def test_collectives_support_strided_and_expanded_tensors(tmp_path):
    assert all(run_on_ranks(collectives_of_layouts, SIZE, tmp_path))


def test_collectives_equal_their_definitions(tmp_path):
    first = torch.arange(8.0).view(4, 2)
    for rank, got in enumerate(run_on_ranks(collectives, SIZE, tmp_path)):
        y, dx = got["AllGather"]
        assert torch.equal(y, torch.cat([first, first + 100])) and torch.equal(
            dx, torch.full((4, 2), 3.0)
        )
        y, dx = got["AllReduce"]
        assert torch.equal(y, 2 * first + 100) and torch.equal(dx, torch.full((4, 2), rank + 1.0))
        y, dx = got["ReduceScatter"]
        assert torch.equal(y, (2 * first + 100).chunk(2)[rank])
        assert torch.equal(dx, torch.tensor([1.0, 1, 2, 2]).unsqueeze(1).expand(4, 2))
