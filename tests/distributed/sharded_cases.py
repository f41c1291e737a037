"""Models with three layer types, trained with and without torch's fully_shard on the same batches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import transformer_engine.pytorch as te
from transformer_engine.common import recipe
from transformer_engine.pytorch.quantization import FP8GlobalStateManager
from transformer_engine.pytorch.tensor import HybridQuantizer

ROWS, BATCH = 32, 1


def _hybrid(role):
    """Products read MXFP8 along rows and one scale a tensor along columns; gradients have one scale."""
    grad = role.tensor_type == "grad_output"
    current = te.Float8CurrentScalingQuantizer(
        te.DType.kFloat8E5M2 if grad else te.DType.kFloat8E4M3
    )
    return current if grad else HybridQuantizer(te.MXFP8Quantizer(te.DType.kFloat8E4M3), current)


RECIPES = {
    "delayed": lambda: recipe.DelayedScaling(amax_history_len=2),
    "current": recipe.Float8CurrentScaling,
    "block": recipe.Float8BlockScaling,
    "mxfp8": recipe.MXFP8BlockScaling,
    "hybrid": lambda: recipe.CustomRecipe(qfactory=_hybrid),
    "nvfp4": lambda: recipe.NVFP4BlockScaling(disable_stochastic_rounding=True),
}


def model_width(name: str) -> int:
    """Model width at which two ranks have complete blocks in each weight."""
    return 256 if name == "block" else 128


@dataclass(frozen=True)
class Run:
    """Settings for a training run: resharding, prefetching, and backward passes per optimizer step."""

    reshard: bool | int | None = True
    prefetch: bool = False
    # The model is made without gradients, so its shards have no column-wise codes.
    rowwise_only: bool = False
    evaluate: bool = False  # a forward without gradients before every step
    recompute: bool = False  # the fused layer recomputes its forward in the backward
    replicated: bool = False  # every rank holds a whole copy
    autocast: bool = True
    accumulate: int = 1
    steps: int = 2


def create_model(name: str, run: Run, device: torch.device) -> nn.Sequential:
    torch.manual_seed(3)
    FP8GlobalStateManager.reset()
    options, width = {"params_dtype": torch.bfloat16, "device": device}, model_width(name)
    with (
        te.quantized_model_init(recipe=RECIPES[name]()),
        torch.set_grad_enabled(not run.rowwise_only),
    ):
        return nn.Sequential(
            te.Linear(width, width, bias=False, **options),
            te.LayerNormMLP(width, width, checkpoint=run.recompute, **options),
            te.TransformerLayer(
                width,
                width,
                4,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                fuse_qkv_params=True,
                **options,
            ),
        )


def sharded(model: nn.Sequential, run: Run, device: torch.device) -> nn.Sequential:
    size = torch.distributed.get_world_size()
    if run.replicated:
        mesh = init_device_mesh(device.type, (size, 1), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh(device.type, (size,))
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=run.reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=run.reshard)
    if run.prefetch:
        layers = list(model)
        for i, layer in enumerate(layers):
            layer.set_modules_to_forward_prefetch(layers[i + 1 : i + 2])
            layer.set_modules_to_backward_prefetch(layers[i - 1 : i] if i else [])
    return model


def batch(name: str, device: torch.device, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(ROWS, BATCH, model_width(name), generator=generator).to(
        device, torch.bfloat16
    )


def train(name: str, run: Run, device: torch.device, shards: bool, look=None) -> torch.Tensor:
    """The outputs of all forwards [n, ROWS, BATCH, width]; ranks see equal batches, so gradients average exactly.

    look(model, loss) is called between forward and backward.
    """
    model = create_model(name, run, device)
    if shards:
        model = sharded(model, run, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    outputs = []
    for step in range(run.steps):
        if run.evaluate:
            with torch.no_grad(), te.autocast(run.autocast, recipe=RECIPES[name]()):
                outputs.append(model(batch(name, device, 1000 + step)).float())
        for i in range(run.accumulate):
            if shards:
                model.set_requires_gradient_sync(i == run.accumulate - 1)
            with te.autocast(run.autocast, recipe=RECIPES[name]()):
                y = model(batch(name, device, 10 * step + i))
            outputs.append(y.detach().float())
            loss = y.float().square().mean() / run.accumulate
            if look is not None:
                look(model, loss)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(outputs)


def count_gathered_bytes(model: nn.Sequential, loss: torch.Tensor) -> int:
    """Weight bytes (tensors with at least width x width elements) in the gathered parameters or the graph."""
    tokens: dict[int, int] = {}
    width = model[0].in_features

    def count(tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if tensor.numel() * (2 if tensor.element_size() == 1 else 1) >= width * width:
            tokens[storage._cdata] = storage.size()

    for layer in model:
        state = layer._get_fsdp_state()
        # One group a module until torch 2.12, several from 2.13 on.
        groups = (
            state._fsdp_param_groups
            if hasattr(state, "_fsdp_param_groups")
            else [state._fsdp_param_group]
        )
        for group in groups:
            for parameter in group.fsdp_params:
                full = parameter._unsharded_param
                for name in getattr(full, "TENSORS", ()):
                    if (tensor := getattr(full, name)) is not None:
                        count(tensor)
    records, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in records:
            continue
        records.add(node)
        waiting += [following for following, _ in node.next_functions]
        for tensor in getattr(node, "saved_tensors", ()):
            if tensor is not None:
                count(tensor)
    return sum(tokens.values())
