"""Train FP8 layers sharded by FSDP2: `torchrun --nproc-per-node 2 examples/fsdp2.py`.

The weights are quantized parameters, so FSDP2 gathers FP8 codes instead of bfloat16 values. The program uses NCCL on
GPUs and gloo on a CPU.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling


def main(argv: list[str] | None = None) -> list[float]:
    """Train and return the losses of the steps, averaged over the ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=20, help="optimizer steps (default: %(default)s)"
    )
    parser.add_argument(
        "--hidden", type=int, default=128, help="hidden size (default: %(default)s)"
    )
    parser.add_argument(
        "--layers", type=int, default=2, help="Transformer layers (default: %(default)s)"
    )
    options = parser.parse_args(argv)

    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = (
        torch.device("cuda", rank % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    )
    if on_gpu:
        torch.cuda.set_device(device)

    recipe = Float8CurrentScaling()
    torch.manual_seed(0)  # every rank initializes the same weights, and then keeps its shard
    with te.quantized_model_init(recipe=recipe):
        model = nn.Sequential(
            *(
                te.LayerNormMLP(options.hidden, 4 * options.hidden, device=device)
                for _ in range(options.layers)
            )
        )
    mesh = init_device_mesh(device.type, (ranks,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = te.optimizers.FusedAdam(model.parameters(), lr=1e-3, master_weights=True)

    losses = []
    for step in range(options.steps):
        # Each rank draws its own batch; FSDP2 averages the gradients.
        x = torch.randn(
            64, options.hidden, generator=torch.Generator().manual_seed(step * ranks + rank)
        )
        x = x.to(device)
        with te.autocast(recipe=recipe):
            loss = (model(x) - x.roll(1, dims=1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / ranks)
        if rank == 0 and (step % 5 == 0 or step == options.steps - 1):
            print(f"step {step + 1:4}  loss {losses[-1]:.4f}")
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
