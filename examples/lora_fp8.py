"""Train LoRA adapters on a frozen FP8 model with PEFT: `python examples/lora_fp8.py`.

The frozen weights exist as FP8 codes only, which halves their memory compared with bfloat16. The adapters and their
optimizer states are in high precision.
"""

from __future__ import annotations

import argparse

import peft
import torch
from torch import nn

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling


def main(argv: list[str] | None = None) -> list[float]:
    """Train and return the losses of the steps."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=60, help="optimizer steps (default: %(default)s)"
    )
    parser.add_argument(
        "--rank", type=int, default=8, help="rank of the LoRA adapters (default: %(default)s)"
    )
    parser.add_argument("--save", help="folder for the adapter")
    options = parser.parse_args(argv)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    recipe = Float8CurrentScaling()
    torch.manual_seed(0)
    with te.quantized_model_init(recipe=recipe):
        network = nn.Sequential(
            te.LayerNormMLP(64, 256, device=device), te.Linear(64, 64, device=device)
        )
    model = peft.get_peft_model(network, peft.LoraConfig(r=options.rank, target_modules=["0", "1"]))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    total = sum(parameter.numel() for parameter in model.parameters())
    print(f"{sum(p.numel() for p in trained):,} of {total:,} parameters are trained")
    optimizer = torch.optim.AdamW(trained, lr=1e-2)

    losses = []
    for step in range(options.steps):
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(step)).to(device)
        with te.autocast(recipe=recipe):
            loss = (model(x) - x.flip(1)).square().mean()
        loss.backward()  # computes no gradient of a frozen weight
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 20 == 0 or step == options.steps - 1:
            print(f"step {step + 1:4}  loss {losses[-1]:.4f}")
    if options.save is not None:
        model.save_pretrained(options.save)
    return losses


if __name__ == "__main__":
    main()
