"""megatron-fsdp as published, on GPUs: `python fsdp_gpu_cases.py CASE` prints the training losses as JSON.

With several processes (RANK, WORLD_SIZE), every rank runs the case on the same data; the first one prints.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import transformer_engine.pytorch as te
from tests.clients.ranked import said_by_the_first
from transformer_engine.common import recipe as recipes

WIDTH, LENGTH, BATCH, STEPS = 256, 128, 2, 6
RECIPES = {
    "delayed": recipes.DelayedScaling,
    "current": recipes.Float8CurrentScaling,
    "block": recipes.Float8BlockScaling,
}


@dataclass(frozen=True)
class Run:
    """How the model is sharded, and which parameters it has.

    strategy None  plain: no megatron-fsdp
    quantized      weights hold codes of the recipe
    keep           column-wise codes outlive a pass
    meta           parameters are made when they are sharded
    """

    strategy: int | None
    recipe: str | None = None
    quantized: bool = False
    meta: bool = False
    decoupled: bool = False
    keep: bool = True


def layers(run: Run) -> torch.nn.Module:
    torch.manual_seed(0)
    torch.cuda.manual_seed(0)
    stored = (
        te.quantized_model_init(recipe=RECIPES[run.recipe](), preserve_high_precision_init_val=True)
        if run.quantized and run.recipe
        else contextlib.nullcontext()
    )
    with stored:
        return torch.nn.Sequential(
            *(
                te.TransformerLayer(
                    WIDTH,
                    2 * WIDTH,
                    4,
                    hidden_dropout=0.0,
                    attention_dropout=0.0,
                    fuse_qkv_params=True,
                    params_dtype=torch.bfloat16,
                    self_attn_mask_type="causal",
                    attn_input_format="bshd",
                    device="meta" if run.meta else "cuda",
                )
                for _ in range(2)
            )
        )


def train_model(run: Run) -> list[float]:
    from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer

    model: Any = layers(run)
    if run.strategy is not None:
        model = fully_shard_model(
            module=model,
            fsdp_unit_modules=[te.TransformerLayer],
            zero_dp_strategy=run.strategy,
            init_model_with_meta_device=run.meta,
            mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=torch.float32),
            keep_fp8_transpose_cache=run.quantized and run.keep,
            use_decoupled_grad=run.decoupled,
        )
    make: Any = te.optimizers.FusedAdam if run.decoupled else torch.optim.AdamW
    settings = {"use_decoupled_grad": True} if run.decoupled else {}
    optimizer = make(model.parameters(), lr=2e-3, weight_decay=0.0, **settings)
    if run.strategy is not None:
        optimizer = fully_shard_optimizer(optimizer)
    generator = torch.Generator().manual_seed(1)
    x, target = torch.randn(2, BATCH, LENGTH, WIDTH, generator=generator).to("cuda", torch.bfloat16)
    losses = []
    for _ in range(STEPS):
        with te.autocast(
            enabled=run.recipe is not None, recipe=RECIPES[run.recipe]() if run.recipe else None
        ):
            loss = torch.nn.functional.mse_loss(model(x).float(), target.float())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


CASES: dict[str, Run] = {
    "plain": Run(None),
    **{f"zero {strategy}": Run(strategy) for strategy in range(4)},
    **{f"zero 3 {recipe}": Run(3, recipe) for recipe in RECIPES},
    **{f"parameters {recipe}": Run(3, recipe, quantized=True) for recipe in RECIPES},
    **{
        f"parameters not kept {recipe}": Run(3, recipe, quantized=True, keep=False)
        for recipe in RECIPES
    },
    "meta": Run(3, meta=True),
    **{
        f"meta parameters {recipe}": Run(3, recipe, quantized=True, meta=True) for recipe in RECIPES
    },
    "decoupled": Run(3, decoupled=True),
}


def main(name: str) -> None:
    warnings.simplefilter("ignore")
    said, sys.stdout = sys.stdout, io.StringIO()
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.cuda.set_device(rank % torch.cuda.device_count())
    if size == 1:
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("nccl")
    result = train_model(CASES[name])
    said_by_the_first(said, result)


if __name__ == "__main__":
    main(sys.argv[1])
