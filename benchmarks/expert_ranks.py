"""Experts over several ranks: dispatch and combine with values and with codes, and a layer of Qwen3-30B-A3B.

    torchrun --standalone --nproc-per-node 4 benchmarks/expert_ranks.py [--json FILE] [--tiny]

Rows "exchange": ep_dispatch and ep_combine with both passes, without experts between them, on 8192 tokens per rank:

- bf16: values; block, mxfp8: tokens, and gradients of the combined output, travel as codes with scales of their rows;
- all_to_all: torch's all_to_all_single of one row per token and expert, in bfloat16, as dispatchers without
  deduplication send them.

Sent MB are the bytes of rows that a rank sends to others in a step. Rows "layer": router, dispatch, two GroupedLinear
with SwiGLU, and combine, with both passes. one_ms is the layer with all experts on each GPU, ranks_ms with experts over
the ranks, each on 8192 tokens per rank. The speedup is the throughput relative to one GPU: ranks * one_ms / ranks_ms.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from record import join_ranks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch.functions.activation import activation
from transformer_engine.pytorch.integrations.torch_modules.timing import time_steps
from transformer_engine.pytorch.module.row_groups import alignment

WARM_UP, TURNS, STEPS = 3, 3, 5


class Shape(NamedTuple):
    """Sizes of a mixture of experts."""

    tokens: int
    hidden: int
    inner: int
    experts: int
    chosen: int


QWEN3 = Shape(8192, 2048, 768, 128, 8)
TINY = Shape(64, 256, 128, 8, 2)
RECIPES: dict[str, Callable[[], recipes.Recipe | None]] = {
    "bf16": lambda: None,
    "delayed": recipes.DelayedScaling,
    "current": recipes.Float8CurrentScaling,
    "block": recipes.Float8BlockScaling,
}
PAYLOADS: dict[str, Callable[[], recipes.Recipe | None]] = {
    "bf16": lambda: None,
    "block": recipes.Float8BlockScaling,
    "mxfp8": recipes.MXFP8BlockScaling,
}


class SentBytes(TorchDispatchMode):
    """Counts the bytes that all-to-alls take as inputs."""

    total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if "alltoall" in func.__name__ or "all_to_all" in func.__name__:
            leaves = [
                leaf for leaf in torch.utils._pytree.tree_leaves(args) if isinstance(leaf, Tensor)
            ]
            self.total += leaves[1].numel() * leaves[1].element_size()  # the output is the first
        return func(*args, **(kwargs or {}))


class Exchange(torch.autograd.Function):
    """torch's all_to_all_single of rows, whose gradient is the reversed exchange."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sends: list[int], receives: list[int]) -> Tensor:
        ctx.sizes = sends, receives
        received = x.new_empty((sum(receives), *x.shape[1:]))
        dist.all_to_all_single(received, x, receives, sends)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        sends, receives = ctx.sizes
        returned = grad.new_empty((sum(sends), *grad.shape[1:]))
        dist.all_to_all_single(returned, grad.contiguous(), sends, receives)
        return returned, None, None


def torch_exchange(x: Tensor, choices: Tensor, weights: Tensor, experts: int) -> Tensor:
    """Send one row per token and expert and return the weighted sum of the rows that come back."""
    ranks, chosen = dist.get_world_size(), choices.shape[1]
    order = choices.flatten().argsort(stable=True)
    counts = torch.bincount(choices.flatten(), minlength=experts).view(ranks, -1)
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts)
    sends, receives = torch.stack((counts.sum(1), received.sum(1))).tolist()
    rows = Exchange.apply(x.index_select(0, order // chosen), sends, receives)
    back: Any = Exchange.apply(rows, receives, sends)
    scaled = back * weights.flatten()[order][:, None].to(x.dtype)
    return torch.zeros_like(x).index_add(0, order // chosen, scaled)


def ep_exchange(buffer: Any, x: Tensor, choices: Tensor, weights: Tensor) -> Tensor:
    rows, row_weights, _ = te.ep.ep_dispatch(buffer, x, choices, weights)
    values = rows.dequantize() if isinstance(rows, te.QuantizedTensor) else rows
    return te.ep.ep_combine(
        buffer, values * row_weights[:, None].to(values.dtype), num_local_tokens=len(x)
    )


class Layer(torch.nn.Module):
    """A mixture of experts, all on this rank, or over the ranks of te.ep."""

    def __init__(self, shape: Shape, device: torch.device, over_ranks: bool) -> None:
        super().__init__()
        self.shape, self.over_ranks = shape, over_ranks
        local = shape.experts // (dist.get_world_size() if over_ranks else 1)
        options: dict[str, Any] = {"bias": False, "params_dtype": torch.bfloat16, "device": device}
        self.local = local
        self.router = torch.nn.Linear(shape.hidden, shape.experts, bias=False, device=device)
        self.fc1 = te.GroupedLinear(local, shape.hidden, 2 * shape.inner, **options)
        self.fc2 = te.GroupedLinear(local, shape.inner, shape.hidden, **options)

    def forward(self, x: Tensor) -> Tensor:
        shape = self.shape
        logits = self.router(x.float())
        if not self.over_ranks:
            probs, routing_map = te.router.fused_topk_with_score_function(
                logits, shape.chosen, False, None, None, None, "softmax", None
            )
            rows, _, row_id_map, pad_offsets, splits = te.moe_permute_and_pad_with_probs(
                x, probs, routing_map, routing_map.sum(0), alignment()
            )
            rows = self.fc2(activation("swiglu", self.fc1(rows, splits)), splits)
            return te.moe_unpermute(rows, row_id_map, probs, pad_offsets=pad_offsets)
        weights, choices = logits.topk(shape.chosen)
        aligned = 1 << (alignment() - 1).bit_length()
        buffer = te.ep.EpBuffer(
            shape.chosen, shape.tokens, shape.hidden, self.local, alignment=aligned
        )
        rows, row_weights, counts = te.ep.ep_dispatch(buffer, x, choices, weights.softmax(-1))
        splits = counts.tolist()
        rows = self.fc2(activation("swiglu", self.fc1(rows, splits)), splits)
        return te.ep.ep_combine(
            buffer, rows * row_weights[:, None].to(rows.dtype), num_local_tokens=shape.tokens
        )


def milliseconds(step: Callable[[], object], device: torch.device) -> float:
    """Measure a step in a loop, on the slowest rank."""
    for _ in range(WARM_UP):
        step()
    synchronize = functools.partial(_synchronize, device)
    times = [1e3 * time_steps(step, STEPS, synchronize) / STEPS for _ in range(TURNS)]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, statistics.median(times))
    return max(found)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def exchange_row(arm: str, shape: Shape, device: torch.device) -> dict[str, Any]:
    """Measure one arm of the exchange."""
    x = torch.randn(
        shape.tokens, shape.hidden, device=device, dtype=torch.bfloat16, requires_grad=True
    )
    scores = torch.randn(shape.tokens, shape.experts, device=device)
    weights, choices = scores.softmax(-1).topk(shape.chosen)
    grad = torch.randn_like(x)
    if arm == "all_to_all":

        def forward() -> Tensor:
            return torch_exchange(x, choices, weights, shape.experts)

    else:
        payload = PAYLOADS[arm]()
        buffer = te.ep.EpBuffer(
            shape.chosen,
            shape.tokens,
            shape.hidden,
            shape.experts // dist.get_world_size(),
            dispatch_fwd_quant_recipe=payload,
            combine_bwd_quant_recipe=payload,
        )

        def forward() -> Tensor:
            return ep_exchange(buffer, x, choices, weights)

    def step() -> None:
        x.grad = None
        forward().backward(grad)

    took = milliseconds(step, device)
    with SentBytes() as sent:
        step()
    size = dist.get_world_size()
    return {"ranks_ms": took, "sent_mb": sent.total * (size - 1) / size / 1e6}


def layer_row(name: str, shape: Shape, device: torch.device) -> dict[str, Any]:
    """Measure the layer on one GPU and over the ranks."""
    times = []
    for over_ranks in (False, True):
        torch.manual_seed(0)
        layer = Layer(shape, device, over_ranks)
        torch.manual_seed(1 + dist.get_rank())
        x = torch.randn(
            shape.tokens, shape.hidden, device=device, dtype=torch.bfloat16, requires_grad=True
        )
        grad = torch.randn_like(x)
        recipe = RECIPES[name]()
        if not over_ranks and isinstance(recipe, recipes.DelayedScaling):
            recipe.reduce_amax = False

        def step(
            layer: Layer = layer,
            x: Tensor = x,
            grad: Tensor = grad,
            recipe: recipes.Recipe | None = recipe,
        ) -> None:
            x.grad = None
            layer.zero_grad(set_to_none=True)
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                y = layer(x)
            y.backward(grad)

        times.append(milliseconds(step, device))
    one, several = times
    return {"one_ms": one, "ranks_ms": several, "speedup": dist.get_world_size() * one / several}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--tiny", action="store_true", help="small sizes, to test the program itself"
    )
    options = parser.parse_args()
    device = join_ranks("cpu:gloo,cuda:nccl")
    shape = TINY if options.tiny else QWEN3
    te.ep.ep_bootstrap(dist.group.WORLD, shape.experts, shape.tokens, shape.hidden, shape.chosen)
    rows: list[dict[str, Any]] = []
    work: list[tuple[str, str, Callable[[], dict[str, Any]]]] = [
        *(
            ("exchange", arm, lambda arm=arm: exchange_row(arm, shape, device))
            for arm in (*PAYLOADS, "all_to_all")
        ),
        *(("layer", name, lambda name=name: layer_row(name, shape, device)) for name in RECIPES),
    ]
    for kind, arm, run in work:
        row: dict[str, Any] = {
            "case": kind,
            "arm": arm,
            "ranks": dist.get_world_size(),
            **shape._asdict(),
        }
        try:
            row |= {name: round(value, 4) for name, value in run().items()}
        except (NotImplementedError, RuntimeError, ValueError) as error:  # the next arm may run
            row["error"] = f"{type(error).__name__}: {error}"[:400]
        rows.append(row)
        if dist.get_rank() == 0:
            print(json.dumps(row), flush=True)
            if options.json:
                options.json.write_text(
                    json.dumps({"torch": torch.__version__, "results": rows}, indent=1)
                )
    te.ep.ep_finalize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
