"""Two ranks train copies (DDP) or flat shards (FSDP1) of a layer; gradients are averaged over the ranks."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.nn.parallel import DistributedDataParallel

import transformer_engine.pytorch as te
from tests.distributed.ranks import run_on_ranks
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

WIDTH, ROWS = 64, 32
RECIPES = {"none": None, "delayed": recipes.DelayedScaling, "current": recipes.Float8CurrentScaling}


def _layers(device):
    torch.manual_seed(3)
    FP8GlobalStateManager.reset()
    return nn.Sequential(
        te.Linear(WIDTH, WIDTH, device=device), te.LayerNormMLP(WIDTH, WIDTH, device=device)
    )


def _loss(model, recipe, number, parts=1):
    """Sum `parts` losses on one output; every rank has its own batch."""
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    with te.autocast(recipe is not None, recipe=None if recipe is None else recipe()):
        y = model(torch.randn(ROWS, WIDTH, generator=generator).to(next(model.parameters()).device))
    return sum(
        ((part - i).square().mean() for i, part in enumerate(y.chunk(parts, dim=-1))),
        y.new_zeros(()),
    )


def _average_gradients(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def _gradients(model):
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def _ddp(recipe, device):
    """Gradients under DDP and averages without it, for one pass, two accumulated passes, and three losses."""
    plain = _layers(device)
    expected = []
    for passes, parts in ((1, 1), (2, 1), (1, 3)):
        plain.zero_grad()
        for number in range(passes):
            _loss(plain, recipe, number, parts).backward()
        _average_gradients(plain)
        expected.append(_gradients(plain))
    buckets = []

    def hook(state, bucket):
        buckets.append(bucket.buffer().numel())
        work = dist.all_reduce(bucket.buffer().div_(2), async_op=True)
        assert work is not None
        return work.get_future().then(lambda future: future.value()[0])

    wrapped = DistributedDataParallel(_layers(device), bucket_cap_mb=0.02)
    wrapped.register_comm_hook(None, hook)
    results = []
    for passes, parts in ((1, 1), (2, 1), (1, 3)):
        wrapped.zero_grad()
        for number in range(passes):
            with nullcontext() if number == passes - 1 else wrapped.no_sync():
                _loss(wrapped, recipe, number, parts).backward()
        results.append(_gradients(wrapped))
    return torch.stack(expected), torch.stack(results), torch.tensor(buckets)


def _fsdp1(recipe, device):
    """Outputs of three steps alone and sharded, on equal batches, and whether quantized parameters are rejected."""

    def train(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        outputs = []
        for number in range(3):
            x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number)).to(device)
            with te.autocast(recipe=recipe()):
                y = model(x)
            outputs.append(y.detach())
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.stack(outputs)

    wrap = te.distributed.FullyShardedDataParallel
    model = wrap(
        nn.Sequential(*[wrap(layer, device_id=device) for layer in _layers(device)]),
        device_id=device,
    )
    layers = [
        module for module in model.modules() if isinstance(module, (te.Linear, te.LayerNormMLP))
    ]
    assert len(layers) == 2 and all(
        dist.get_world_size(vars(layer)["fsdp_group"]) == 2 for layer in layers
    )
    assert isinstance(model, fsdp.FullyShardedDataParallel)
    with te.quantized_model_init(recipe=recipe()):
        quantized = te.Linear(WIDTH, WIDTH, device=device)
    with pytest.raises(RuntimeError, match="holds quantized parameters"):
        te.distributed.prepare_te_modules_for_fsdp(_wrap_quantized_parameters(quantized, model))
    return train(_layers(device)), train(model)


def _wrap_quantized_parameters(layer, wrapper):
    """A wrapper whose module is a layer with quantized parameters, which torch's constructor cannot flatten."""
    copy = wrapper.__class__.__new__(wrapper.__class__)
    nn.Module.__init__(copy)
    copy._fsdp_wrapped_module = layer
    return copy


def _everything(device):
    results = {f"ddp {name}": _ddp(recipe, device) for name, recipe in RECIPES.items()}
    return results | {
        f"fsdp1 {name}": _fsdp1(RECIPES[name], device) for name in ("delayed", "current")
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_on_ranks(_everything, 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", RECIPES)
def test_ddp_averages_gradients_in_buckets(name, ranks):
    for rank in ranks:
        expected, actual, buckets = rank[f"ddp {name}"]
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-9)
        # DDP sends the first gradients in one bucket and rebuilds its buckets for the later ones.
        assert len(buckets) > 3 and buckets.sum() == 3 * actual.shape[1]
        assert torch.equal(actual, ranks[0][f"ddp {name}"][1])
        assert actual.isfinite().all() and not torch.equal(actual[0], actual[1])


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_flat_shards_train_as_one_device(name, ranks):
    for rank in ranks:
        alone, sharded = rank[f"fsdp1 {name}"]
        assert torch.equal(alone, sharded)
        assert not torch.equal(alone[0], alone[2])
