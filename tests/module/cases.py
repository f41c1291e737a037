"""Recipes, layers and a training loop that several module tests share."""

from __future__ import annotations

import torch

from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from transformer_engine.pytorch.module.layernorm_linear import LayerNormLinear
from transformer_engine.pytorch.module.layernorm_mlp import LayerNormMLP
from transformer_engine.pytorch.module.linear import Linear
from transformer_engine.pytorch.quantization import autocast

RECIPES = {
    "none": None,
    "delayed": DelayedScaling(amax_history_len=4),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    # Without stochastic rounding, whose draws differ from one run to the next.
    "nvfp4": NVFP4BlockScaling(disable_stochastic_rounding=True),
}
QUANTIZED = [name for name in RECIPES if name != "none"]
HIDDEN = 64

LAYERS = {
    "linear": lambda **options: Linear(HIDDEN, 96, **options),
    "layernorm_linear": lambda **options: LayerNormLinear(HIDDEN, 96, **options),
    "layernorm_mlp": lambda **options: LayerNormMLP(HIDDEN, 96, **options),
}


def sample(device: str, rows: tuple[int, ...] = (2, 32), dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*rows, HIDDEN, device=device, dtype=dtype, requires_grad=True)


def step(layer, x: torch.Tensor, recipe=None, **options) -> list[torch.Tensor]:
    """One forward and backward: [output, input gradient, parameter gradients]."""
    with autocast(enabled=recipe is not None, recipe=recipe):
        y = layer(x, **options)
    (y.float().sin().sum() * 3).backward()
    results = [y.detach(), x.grad.clone()]
    results += [p.grad.clone() for p in layer.parameters() if p.grad is not None]
    x.grad = None
    for p in layer.parameters():
        p.grad = None
    return results


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def same_as_eager(eager: list[torch.Tensor], compiled: list[torch.Tensor]) -> bool:
    """The bits of eager mode; on a GPU, up to float32 rounding, for eager mode sums in kernels that do more at once."""
    for a, b in zip(eager, compiled, strict=True):
        if a.is_cuda:
            if float((a - b).norm()) > 1e-5 * float(a.norm()):
                return False
        elif not torch.equal(a, b):
            return False
    return True
