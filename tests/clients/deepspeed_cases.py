"""A Llama that accelerate and DeepSpeed train in FP8, on GPUs if there are any; see test_deepspeed.py.

python deepspeed_cases.py STAGE: rank 0 prints its losses and the number of engine layers as JSON.
"""

from __future__ import annotations

import json
import sys

import torch

import transformer_engine.pytorch as te
from tests.clients.installed import tiny_llama

STEPS = 6


def main(stage: int) -> None:
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import TERecipeKwargs

    recipe = TERecipeKwargs(fp8_format="HYBRID", amax_history_len=16, amax_compute_algo="max")
    plugin = DeepSpeedPlugin(zero_stage=stage, gradient_accumulation_steps=1)
    plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 4
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision="fp8",
        kwargs_handlers=[recipe],
        deepspeed_plugin=plugin,
    )
    model = tiny_llama()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=2e-3))
    torch.manual_seed(accelerator.process_index)
    tokens = torch.randint(0, 96, (4, 32), device="cpu").to(accelerator.device)
    losses = []
    for _ in range(STEPS):
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if accelerator.is_main_process:
        layers = sum(isinstance(module, te.Linear) for module in model.modules())
        print(json.dumps({"losses": losses, "layers": layers}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
