"""Study MXFP8 and NVFP4 on a CPU: `TE_EMULATE=1 python examples/formats_on_cpu.py`.

The codes and scales are those of the GPUs that have the formats, bit for bit. The program prints the error of each
recipe's cast for three distributions, then trains one small model under each recipe from the same weights and on the
same batches.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor, nn

import transformer_engine.pytorch as te
from transformer_engine.common import recipe

RECIPES = {
    "current": recipe.Float8CurrentScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "nvfp4": recipe.NVFP4BlockScaling(),
}
QUANTIZERS = {
    "current": te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device="cpu"),
    "mxfp8": te.MXFP8Quantizer(te.DType.kFloat8E4M3),
    "nvfp4": te.NVFP4Quantizer(),
}


def distributions(rows: int = 256, columns: int = 256) -> dict[str, Tensor]:
    """Matrices [rows, columns]: normal values, a few outliers, and rows of very different magnitude."""
    torch.manual_seed(0)
    normal = torch.randn(rows, columns)
    outliers = normal.clone()
    outliers[0, 0] = 1e5
    return {
        "normal": normal,
        "one outlier of 1e5": outliers,
        "rows from 1e-4 to 1e4": normal * torch.logspace(-4, 4, rows)[:, None],
    }


def sqnr(x: Tensor, approximation: Tensor) -> float:
    """Mean over the rows of the signal to quantization noise ratio, in decibels."""
    noise = (x - approximation).square().sum(1).clamp_min(1e-30)
    return (10 * (x.square().sum(1) / noise).log10()).mean().item()


def trained(name: str, steps: int) -> float:
    """Train a small network under a recipe, or in float32 for "none"; return the last loss."""
    torch.manual_seed(0)
    model = nn.Sequential(
        te.LayerNormMLP(128, 256, device="cpu"), te.Linear(128, 128, device="cpu")
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loss = torch.tensor(math.nan)
    for step in range(steps):
        x = torch.randn(64, 128, generator=torch.Generator().manual_seed(step))
        with te.autocast(enabled=name != "none", recipe=RECIPES.get(name)):
            loss = (model(x) - x.flip(1).tanh()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def main(argv: list[str] | None = None) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Print and return the errors {distribution: {recipe: decibels}} and the last losses {recipe: loss}."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=50, help="optimizer steps (default: %(default)s)"
    )
    options = parser.parse_args(argv)

    errors = {
        kind: {name: sqnr(x, quantizer(x).dequantize()) for name, quantizer in QUANTIZERS.items()}
        for kind, x in distributions().items()
    }
    print(f"{'signal to noise, dB':24}" + "".join(f"{name:>9}" for name in QUANTIZERS))
    for kind, row in errors.items():
        print(f"{kind:24}" + "".join(f"{value:9.1f}" for value in row.values()))
    with te.emulate():
        losses = {name: trained(name, options.steps) for name in ("none", *RECIPES)}
    print(
        f"loss after {options.steps} steps: "
        + ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items())
    )
    return errors, losses


if __name__ == "__main__":
    main()
