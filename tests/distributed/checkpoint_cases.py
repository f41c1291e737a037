"""A model trained by four ranks, saved by torch.distributed.checkpoint, and read again by two ranks and by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import transformer_engine.pytorch as te
from tests.distributed.sharded_cases import RECIPES
from transformer_engine.pytorch.quantization import FP8GlobalStateManager, emulate
from transformer_engine.pytorch.quantization.extra_state import decode_extra_state
from transformer_engine.pytorch.tensor import QuantizedTensor

WIDTH, HIDDEN, ROWS = 128, 512, 32  # 512 rows over four ranks end where blocks of 128 rows do


class Trained:
    """A model and its optimizer, sharded over a mesh; mesh=None is one device.

    `scaling_group` is the group of the ranks that train. Delayed scaling reduces its maxima over this group, or over
    all ranks if it is None.
    """

    def __init__(self, name: str, quantized: bool, mesh: DeviceMesh | None, scaling_group: Any):
        FP8GlobalStateManager.reset()
        torch.manual_seed(3)
        self.scaling_group = scaling_group
        self.recipe = RECIPES[name]()
        options = {"params_dtype": torch.bfloat16, "device": "cpu"}
        with te.quantized_model_init(quantized, recipe=self.recipe):
            self.model = nn.Sequential(
                te.LayerNormLinear(WIDTH, HIDDEN, **options), te.Linear(HIDDEN, HIDDEN, **options)
            )
        if mesh is not None:
            for layer in (*self.model, self.model):
                fully_shard(layer, mesh=mesh)
        self.optimizer = te.optimizers.FusedAdam(
            self.model.parameters(), lr=1e-2, master_weights=True
        )

    def step(self, number: int) -> Tensor:
        """Train on a batch that is equal on all ranks; return the output [ROWS, HIDDEN]."""
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number)).bfloat16()
        with te.autocast(recipe=self.recipe, amax_reduction_group=self.scaling_group):
            y = self.model(x)
        y.float().square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return y.detach()

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load(self, directory: Path, group: Any) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=directory, process_group=group, no_dist=group is None)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def whole(self, group: Any) -> dict[str, Tensor]:
        """Bytes for full parameters (codes and scales if quantized), optimizer states and scaling states."""
        results = {}
        for name, parameter in self.model.named_parameters():
            tensors = {"": parameter, **self.optimizer.state[parameter]}
            for state, tensor in tensors.items():
                for i, part in enumerate(gather_shards(tensor, group)):
                    # later steps change the tensors
                    results[f"{name}/{state}/{i}"] = part.detach().clone()
        for name, extra in self.model.state_dict().items():
            content = decode_extra_state(extra) if name.endswith("_extra_state") else None
            for key, value in (content or {}).items():
                if isinstance(value, Tensor):
                    results[f"{name}/{key}"] = value
        return results


def gather_shards(tensor: Tensor, group: Any) -> list[Tensor]:
    """All-gather the payload tensors from every shard, as plain tensors."""
    local: Any = tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()
    if not isinstance(local, QuantizedTensor):
        return [tensor.full_tensor() if isinstance(tensor, DTensor) else local]
    sent, payload = local.fsdp_extract_buffers()
    if isinstance(tensor, DTensor):
        everywhere = []
        for part in sent:
            parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, part, group=group)
            everywhere.append(torch.cat(parts))
        sent = tuple(everywhere)
    return [*sent, *payload.whole.values()]


def save_and_load(
    device: torch.device, cases: list[tuple[str, bool]], directory: Path
) -> dict[str, Any]:
    """Per recipe and parameter type: states saved by 4 ranks and read by 2 and 1, and the following steps.

    The four ranks are two replicas with two shards each in the first case, and four shards in the others.
    """
    replicated = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    meshes = {size: DeviceMesh("cpu", list(range(size))) for size in (4, 2, 1)}
    results = {}
    with emulate():  # MXFP8 on the CPU in a machine with a Hopper GPU
        for name, quantized in cases:
            position = directory / f"{name}-{quantized}"
            mesh = replicated if (name, quantized) == cases[0] else meshes[4]
            saved = Trained(name, quantized, mesh, None)
            first = saved.step(0)
            dcp.save(saved.state(), checkpoint_id=position)
            states = {4: saved.whole(mesh.get_group(mesh.ndim - 1))}
            steps = {4: torch.stack([first, saved.step(1), saved.step(2)])}
            for size in (2, 1):
                if dist.get_rank() < size:
                    scaling_group = meshes[size].get_group()
                    group = scaling_group if size > 1 else None
                    read = Trained(
                        name, quantized, meshes[size] if size > 1 else None, scaling_group
                    )
                    read.load(position, group)
                    states[size] = read.whole(group)
                    steps[size] = torch.stack([first, read.step(1), read.step(2)])
                dist.barrier()
            results[f"{name}-{quantized}"] = {"states": states, "steps": steps}
    return results
