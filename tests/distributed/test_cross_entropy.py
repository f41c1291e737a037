"""A vocabulary sharded over two ranks: both compute the same loss, and each the gradient of its columns."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import run_on_ranks
from transformer_engine.pytorch import parallel_cross_entropy

IDS = 26


def whole(device):
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(2, 5, IDS, generator=generator)
    target = torch.randint(0, IDS, (2, 5), generator=generator)
    target[1, 1] = -100
    return logits.to(device), target.to(device)


def _losses(device):
    logits, target = whole(device)
    local = logits.chunk(2, dim=-1)[dist.get_rank()].contiguous()
    results = []
    for smoothing, mean in ((0.0, True), (0.1, False)):
        leaf = local.clone().requires_grad_()
        loss = parallel_cross_entropy(leaf, target, smoothing, mean, dist.group.WORLD)
        loss.sum().backward()
        results += [loss.detach(), leaf.grad]
    return results


def test_two_ranks_give_the_loss_and_the_gradient_of_one(tmp_path):
    first, second = run_on_ranks(_losses, 2, tmp_path)
    logits, target = whole("cpu")
    for index, (smoothing, mean) in enumerate(((0.0, True), (0.1, False))):
        leaf = logits.clone().requires_grad_()
        loss = parallel_cross_entropy(leaf, target, smoothing, mean)
        loss.sum().backward()
        assert torch.equal(first[2 * index], second[2 * index])
        torch.testing.assert_close(first[2 * index], loss.detach(), rtol=1e-5, atol=1e-6)
        grad = torch.cat([result[2 * index + 1] for result in (first, second)], dim=-1)
        torch.testing.assert_close(grad, leaf.grad, rtol=1e-5, atol=1e-7)


def _outside(device):
    logits, target = whole(device)
    local = logits.chunk(2, dim=-1)[dist.get_rank()].contiguous()
    with pytest.raises(ValueError, match=f"target {IDS} is outside of a vocabulary of {IDS} ids"):
        parallel_cross_entropy(
            local,
            torch.full_like(target, IDS),
            label_smoothing=0.0,
            reduce_loss=False,
            dist_process_group=dist.group.WORLD,
        )
    return torch.ones(1)


@pytest.mark.skipif(
    torch.cuda.device_count() >= 2, reason="labels on a GPU are checked with TE_CHECK alone"
)
def test_labels_are_ids_of_the_whole_vocabulary(tmp_path):
    assert len(run_on_ranks(_outside, 2, tmp_path)) == 2
