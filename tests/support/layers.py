"""One small layer per public layer class, the recipes, and one layer call with all its results."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)

RECIPES: dict[str, Recipe | None] = {
    "none": None,
    "delayed": DelayedScaling(amax_history_len=4),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    # Without stochastic rounding, whose draws differ from one run to the next.
    "nvfp4": NVFP4BlockScaling(disable_stochastic_rounding=True),
}
QUANTIZED = [name for name in RECIPES if name != "none"]

HIDDEN, FFN, HEADS, TOKENS, BATCH = 64, 96, 2, 16, 4
_NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
# {public layer: constructor arguments}
KINDS: dict[type[torch.nn.Module], dict[str, Any]] = {
    te.Linear: {"in_features": HIDDEN, "out_features": FFN},
    te.LayerNormLinear: {"in_features": HIDDEN, "out_features": FFN},
    te.LayerNormMLP: {"hidden_size": HIDDEN, "ffn_hidden_size": FFN},
    te.GroupedLinear: {"num_gemms": 2, "in_features": HIDDEN, "out_features": FFN},
    te.LayerNorm: {"normalized_shape": HIDDEN},
    te.RMSNorm: {"normalized_shape": HIDDEN},
    te.DotProductAttention: {"num_attention_heads": HEADS, "kv_channels": HIDDEN // HEADS},
    te.MultiheadAttention: {
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "attention_dropout": 0.0,
    },
    te.TransformerLayer: {
        "hidden_size": HIDDEN,
        "ffn_hidden_size": FFN,
        "num_attention_heads": HEADS,
        **_NO_DROPOUT,
    },
}
NAMES = {kind.__name__: kind for kind in KINDS}


def make_layer(
    name: str, /, device: torch.device | str | None = None, **options: Any
) -> torch.nn.Module:
    """A layer by its class name, always with the same weights; on the available device by default."""
    kind = NAMES[name]
    torch.manual_seed(0)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    takes = inspect.signature(kind.__init__).parameters
    placed = {"device": device} if "device" in takes else {}
    layer = kind(**(KINDS[kind] | placed | options))
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return layer


def make_call(
    layer: torch.nn.Module, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, Callable]:
    """An input that requires a gradient, and a function that calls the layer with it."""
    packed = isinstance(layer, te.DotProductAttention)
    shape = (TOKENS, BATCH, 3, HEADS, HIDDEN // HEADS) if packed else (TOKENS, BATCH, HIDDEN)
    nowhere = torch.empty(0, device="cuda" if torch.cuda.is_available() else "cpu")
    device = next(layer.parameters(), nowhere).device
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()
    if packed:
        return x, lambda: layer(qkv_layer=x)
    if isinstance(layer, te.GroupedLinear):
        rows = TOKENS * BATCH // 2
        return x, lambda: layer(x, [rows, rows])
    return x, lambda: layer(x)


def results(layer: torch.nn.Module, recipe: Recipe | None = None) -> list[torch.Tensor]:
    """Outputs, input gradient and parameter gradients from one call; no gradients are left behind."""
    x, call = make_call(layer)
    layer.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = call()
    ys = [part for part in (y if isinstance(y, tuple) else (y,)) if isinstance(part, torch.Tensor)]
    differentiable = [part.float() * (1 + i) for i, part in enumerate(ys) if part.requires_grad]
    if differentiable:
        sum(part.sin().sum() for part in differentiable).backward()
    grads = [p.grad for p in (x, *layer.parameters()) if p.grad is not None]
    result = [part.detach().clone() for part in ys] + [grad.clone() for grad in grads]
    layer.zero_grad(set_to_none=True)
    return result


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    """The same tensor count, the same bits."""
    return len(first) == len(second) and all(
        torch.equal(a, b) for a, b in zip(first, second, strict=True)
    )


def same_as_eager(eager: list[torch.Tensor], compiled: list[torch.Tensor]) -> bool:
    """Bitwise equality; on a GPU up to float32 rounding, as eager mode sums in kernels that fuse more."""
    for a, b in zip(eager, compiled, strict=True):
        if a.is_cuda:
            if float((a - b).norm()) > 1e-5 * float(a.norm()):
                return False
        elif not torch.equal(a, b):
            return False
    return True


LAYERS = {
    "linear": lambda **options: te.Linear(HIDDEN, FFN, **options),
    "layernorm_linear": lambda **options: te.LayerNormLinear(HIDDEN, FFN, **options),
    "layernorm_mlp": lambda **options: te.LayerNormMLP(HIDDEN, FFN, **options),
}


def sample(
    device: torch.device | str, rows: tuple[int, ...] = (2, 32), dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """An input [.., HIDDEN] that requires a gradient."""
    return torch.randn(*rows, HIDDEN, device=device, dtype=dtype, requires_grad=True)


def step(
    layer: torch.nn.Module, x: torch.Tensor, recipe: Recipe | None = None, **options: Any
) -> list[torch.Tensor]:
    """One forward and backward: [output, input gradient, parameter gradients]."""
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = layer(x, **options)
    (y.float().sin().sum() * 3).backward()
    results = [y.detach(), x.grad.clone()]
    results += [p.grad.clone() for p in layer.parameters() if p.grad is not None]
    x.grad = None
    for p in layer.parameters():
        p.grad = None
    return results
