"""Models of te.convert under fully_shard: sharded on two ranks, they train as on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import transformer_engine.pytorch as te
from tests.distributed.ranks import run_on_ranks
from tests.integrations.torch_models import Decoder, tokens
from transformer_engine.common.recipe import Float8CurrentScaling


def _steps(model: nn.Module, device: torch.device) -> list[torch.Tensor]:
    x = tokens().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def _train(device: torch.device) -> dict[str, Any]:
    def shard(model: Any) -> Any:
        mesh = init_device_mesh(device.type, (2,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    with te.emulate():
        results: dict[str, Any] = {}
        options = {"recipe": Float8CurrentScaling(), "verbose": False}
        alone = te.convert(Decoder().to(device), sample=tokens().to(device), **options)
        results["alone"] = _steps(alone, device)
        before = shard(te.convert(Decoder().to(device), sample=tokens().to(device), **options))
        results["converted, sharded"] = _steps(before, device)
        after = te.convert(shard(Decoder().to(device)), sample=tokens().to(device), **options)
        results["sharded, converted"] = _steps(after, device)
        assert all(isinstance(parameter, DTensor) for parameter in after.parameters())
        keys = list(Decoder().state_dict())
        assert list(before.state_dict()) == keys and list(after.state_dict()) == keys
        choices = [
            [row.choice for row in te.conversion_table(model)] for model in (alone, before, after)
        ]
        results["choices"] = [torch.tensor(choices[0] == other) for other in choices]
    return results


def test_sharded_models_train_as_on_one_rank(tmp_path: Path):
    for results in run_on_ranks(_train, 2, tmp_path):
        assert all(results.pop("choices"))
        alone = results.pop("alone")
        for losses in results.values():
            torch.testing.assert_close(losses, alone, rtol=1e-5, atol=1e-6)


def _convert_sharded_layers(device: torch.device) -> dict[str, Any]:
    mesh = init_device_mesh(device.type, (2,))
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model.to(device)
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    with te.emulate():
        te.convert(model, Float8CurrentScaling(), verbose=False)
    return {row.name: f"{row.choice}: {row.reason}" for row in te.conversion_table(model)}


def test_the_table_names_layers_that_were_sharded_one_by_one(tmp_path: Path):
    for rows in run_on_ranks(_convert_sharded_layers, 2, tmp_path):
        assert rows["0"].startswith("torch: fully_shard was applied to this module itself")
        assert rows["1"] == "Float8CurrentScaling: supported"
