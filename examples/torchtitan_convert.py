"""A torchtitan-like training loop in FP8: a plain PyTorch Llama, converted, compiled block by block, sharded by FSDP2.

torchtitan applies model converters after it builds a model and before it parallelizes it. `EngineConverter` has their
two methods, `convert` and `post_optimizer_hook`, and takes a section of the configuration of a job:

    [model]
    converters = ["transformer_engine"]

    [transformer_engine]
    recipe = "Float8CurrentScaling"
    exclude = ["output"]

    python examples/torchtitan_convert.py --steps 20
    torchrun --nproc-per-node 2 examples/torchtitan_convert.py --steps 20
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass
class EngineConfig:
    """Section `[transformer_engine]` of a job."""

    recipe: str = "Float8CurrentScaling"
    exclude: list[str] = field(default_factory=lambda: ["output"])


class EngineConverter:
    """Model converter with torchtitan's interface."""

    def __init__(self, config: EngineConfig, sample: Tensor) -> None:
        self.config, self.sample = config, sample

    def convert(self, model: nn.Module) -> None:
        """Convert linear layers, norms and attention in place; parameters and their names stay."""
        recipe = getattr(recipes, self.config.recipe)()
        te.convert(model, recipe, sample=self.sample, exclude=self.config.exclude)

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Nothing: scales follow from each tensor, so that no state is updated after a step."""


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.head = hidden // heads
        self.wq, self.wk, self.wv, self.wo = (
            nn.Linear(hidden, hidden, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            w(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: Tensor = self.wo(heads.transpose(1, 2).flatten(2))
        return y


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = (nn.RMSNorm(hidden, eps=1e-5) for _ in range(2))
        self.attention = Attention(hidden, heads)
        self.w1, self.w3 = (nn.Linear(hidden, 3 * hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(3 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        h = self.ffn_norm(x)
        mlp: Tensor = self.w2(F.silu(self.w1(h)) * self.w3(h))
        return x + mlp


class Llama(nn.Module):
    def __init__(self, vocabulary: int, hidden: int, heads: int, layers: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleDict({str(number): Block(hidden, heads) for number in range(layers)})
        self.norm, self.output = (
            nn.RMSNorm(hidden, eps=1e-5),
            nn.Linear(hidden, vocabulary, bias=False),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x)
        logits: Tensor = self.output(self.norm(x))
        return logits


def parallelize(model: Llama, compiled: bool) -> None:
    """Compile every block, then shard the blocks and the model, as torchtitan does."""
    if compiled:
        for layer in model.layers.values():
            layer.compile(fullgraph=True)
    if dist.is_initialized():
        mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
        for layer in model.layers.values():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train on the text of this file, and return the losses."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument(
        "--steps", type=int, default=20, help="optimizer steps (default: %(default)s)"
    )
    options.add_argument(
        "--hidden", type=int, default=128, help="hidden size (default: %(default)s)"
    )
    options.add_argument(
        "--layers", type=int, default=2, help="Transformer layers (default: %(default)s)"
    )
    options.add_argument(
        "--recipe",
        default=EngineConfig.recipe,
        help="recipe of the matrix products; none: high precision (default: %(default)s)",
    )
    options.add_argument("--compile", action="store_true", help="compile every block")
    chosen = options.parse_args(arguments)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    with open(__file__, "rb") as file:
        text = torch.tensor(list(file.read()), device=DEVICE)
    torch.manual_seed(0)
    model = Llama(256, chosen.hidden, 4, chosen.layers).to(DEVICE)
    sample = text[:512].view(8, 64)
    EngineConverter(EngineConfig(recipe=chosen.recipe), sample).convert(model)
    parallelize(model, chosen.compile)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(1 + rank)
    losses = []
    for _ in range(chosen.steps):
        starts = torch.randint(0, len(text) - 65, (8,)).tolist()
        batch = torch.stack([text[start : start + 65] for start in starts])
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if rank == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    if dist.is_initialized():
        dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
