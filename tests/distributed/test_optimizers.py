"""Optimizers on parameters sharded over two ranks, and weights that both ranks write from master shards."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import transformer_engine.pytorch as te
from tests.distributed.ranks import run_on_ranks
from transformer_engine.common.recipe import Float8CurrentScaling
from transformer_engine.pytorch.optimizers import FusedAdam, FusedMuon
from transformer_engine.pytorch.tensor.utils import (
    post_all_gather_processing,
    quantize_master_weights,
)

SHAPES = ((6, 4), (1, 3))  # one rank has an empty shard of the second parameter
WIDTH, STEPS = 32, 4


def whole(kind):
    generator = torch.Generator().manual_seed(kind)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def _sharded_steps(device):
    mesh = init_device_mesh(device.type, (2,))
    params = [
        torch.nn.Parameter(distribute_tensor(x.to(device), mesh, [Shard(0)])) for x in whole(0)
    ]
    optimizer = FusedAdam(params, lr=0.1, weight_decay=0.1)
    for step in range(3):
        for p, grad in zip(params, whole(step + 1), strict=True):
            p.grad = distribute_tensor(grad.to(device), mesh, [Shard(0)])
        optimizer.step()
    saved = optimizer.state_dict()["state"]
    states = [state["exp_avg"] for state in saved.values()]
    assert all(isinstance(state, DTensor) for state in states)
    assert [tuple(state.shape) for state in states] == list(SHAPES)
    return [tensor.detach().full_tensor() for tensor in (*params, *states)]


def test_two_ranks_step_distributed_parameters_like_one_rank(tmp_path):
    first, second = run_on_ranks(_sharded_steps, 2, tmp_path)
    params = [torch.nn.Parameter(x) for x in whole(0)]
    optimizer = torch.optim.AdamW(params, lr=0.1, weight_decay=0.1)
    for step in range(3):
        for p, grad in zip(params, whole(step + 1), strict=True):
            p.grad = grad
        optimizer.step()
    expected = [*params, *(optimizer.state[p]["exp_avg"] for p in params)]
    for ours, reference, right in zip(first, second, expected, strict=True):
        assert torch.equal(ours, reference)
        torch.testing.assert_close(ours, right.detach(), rtol=1e-5, atol=1e-6)


def _layer(device, recipe):
    torch.manual_seed(1)
    with te.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        return te.Linear(WIDTH, WIDTH, bias=False, params_dtype=torch.bfloat16, device=device)


def _loss(layer, recipe, device):
    generator = torch.Generator().manual_seed(2)
    x, target = (
        torch.randn(WIDTH, WIDTH, generator=generator).to(device).bfloat16() for _ in range(2)
    )
    with te.autocast(recipe=recipe):
        loss = (layer(x) - target).float().square().mean()
    loss.backward()
    return loss.detach()


def _zero_redundancy(device):
    """Losses with master weights sharded over the ranks, and with all masters on every rank."""
    recipe = Float8CurrentScaling()
    rank, result = dist.get_rank(), []
    layer, replica = _layer(device, recipe), _layer(device, recipe)
    flat = layer.weight.get_high_precision_init_val().float().view(-1).to(device)
    cut = 600  # not in the middle, nor at a row's end
    start, stop = ((0, cut), (cut, flat.numel()))[rank]
    shard, whole_master = (
        torch.nn.Parameter(flat[start:stop].clone()),
        torch.nn.Parameter(flat.clone()),
    )
    one, all_of_it = FusedAdam([shard], lr=1e-2), FusedAdam([whole_master], lr=1e-2)
    for _ in range(STEPS):
        for model in (layer, replica):
            model.weight.grad = None
            result.append(_loss(model, recipe, device))
        shard.grad = layer.weight.grad.float().view(-1)[start:stop]
        whole_master.grad = replica.weight.grad.float().view(-1)
        one.step()
        all_of_it.step()
        quantize_master_weights([layer.weight], [shard], [start], dist.group.WORLD)
        codes = layer.weight._data.view(-1)
        codes[:start], codes[stop:] = 0, 0
        dist.all_reduce(codes)
        post_all_gather_processing(layer.weight)
        quantize_master_weights([replica.weight], [whole_master], [0], dist.group.WORLD)
        post_all_gather_processing([replica.weight])
    return torch.stack(result).view(STEPS, 2)


def test_sharded_master_weights_give_the_same_losses(tmp_path):
    for losses in run_on_ranks(_zero_redundancy, 2, tmp_path):
        assert torch.equal(losses[:, 0], losses[:, 1])
        assert losses[-1, 0] < losses[0, 0]


MATRICES = ((6, 4), (4, 8), (2, 4, 6))


def _matrices(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in MATRICES]


def _muon_steps(device):
    """Parameters after each step under FSDP2 and tensor parallelism, as full tensors."""
    mesh = init_device_mesh(device.type, (2,))
    sharded = [
        torch.nn.Parameter(distribute_tensor(x.to(device), mesh, [Shard(0)])) for x in _matrices(0)
    ]
    rank = dist.get_rank()
    parts = []
    for dimension, matrix in enumerate(_matrices(0)[:2]):
        part = torch.nn.Parameter(matrix.to(device).chunk(2, dimension)[rank].contiguous())
        part.tensor_model_parallel, part.partition_dim = True, dimension
        parts.append(part)
    optimizers = (
        FusedMuon(sharded, lr=0.1, ns_dtype=torch.float32),
        FusedMuon(parts, lr=0.1, ns_dtype=torch.float32, tp_group=dist.group.WORLD),
    )
    for step in range(3):
        grads = [grad.to(device) for grad in _matrices(step + 1)]
        for parameter, grad in zip(sharded, grads, strict=True):
            parameter.grad = distribute_tensor(grad, mesh, [Shard(0)])
        for dimension, (part, grad) in enumerate(zip(parts, grads[:2], strict=True)):
            part.grad = grad.chunk(2, dimension)[rank].contiguous()
        for optimizer in optimizers:
            optimizer.step()
    assert isinstance(optimizers[0].state[sharded[0]]["momentum_buffer"], DTensor)
    return [parameter.detach().full_tensor() for parameter in sharded], [
        part.detach() for part in parts
    ]


def test_muon_steps_on_sharded_matrices_equal_unsharded_steps(tmp_path):
    (first, upper), (second, lower) = run_on_ranks(_muon_steps, 2, tmp_path)
    params = [torch.nn.Parameter(x) for x in _matrices(0)]
    optimizer = FusedMuon(params, lr=0.1, ns_dtype=torch.float32)
    for step in range(3):
        for p, grad in zip(params, _matrices(step + 1), strict=True):
            p.grad = grad
        optimizer.step()
    for ours, reference, right in zip(first, second, params, strict=True):
        assert torch.equal(ours, reference)
        torch.testing.assert_close(ours, right.detach(), rtol=1e-5, atol=1e-5)
    for dimension in (0, 1):
        joined = torch.cat((upper[dimension], lower[dimension]), dimension)
        torch.testing.assert_close(joined, params[dimension].detach(), rtol=1e-5, atol=1e-5)
