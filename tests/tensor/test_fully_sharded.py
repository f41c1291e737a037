"""torch's fully_shard on quantized parameters: bytes are gathered, shards stay quantized, ranks agree."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.distributed.ranks import run_on_ranks
from tests.tensor.quantizer_cases import create_quantizer, values
from transformer_engine.pytorch.tensor import QuantizedTensor

FORMATS = ("current", "mxfp8", "block_2d", "nvfp4_2d")


class Layer(nn.Module):
    def __init__(self, name, device):
        super().__init__()
        self.weight = nn.Parameter(create_quantizer(name, device)(values(device, 256, 64)))

    def forward(self, x):
        assert isinstance(self.weight, QuantizedTensor)
        return x @ self.weight.dequantize().t()


def _train(device):
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    x = values(device, 8, 64)
    outputs = {}
    for name in FORMATS:
        layer = Layer(name, device)
        expected = x @ layer.weight.dequantize().detach().t()
        model = fully_shard(nn.Sequential(layer), mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
        steps = []
        for _ in range(3):
            y = model(x)
            steps.append(y.detach())
            y.float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(steps[0], expected)
        assert isinstance(layer.weight._local_tensor, QuantizedTensor)
        outputs[name] = torch.stack(steps)
    return outputs


def test_shards_train_together(tmp_path):
    first, second = run_on_ranks(_train, 2, tmp_path)
    for name in FORMATS:
        assert torch.equal(first[name], second[name]), name
        assert not torch.equal(first[name][0], first[name][2]), name
