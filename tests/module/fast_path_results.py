"""Prints {case: digest of results and gradients} for layers and operation chains under every recipe, as JSON.

`test_fast_path.py` compares the digests with and without TE_FAST=0.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch

import transformer_engine.pytorch as te
from tests.support.layers import NAMES, RECIPES, make_call, make_layer
from transformer_engine.common.recipe import Recipe
from transformer_engine.pytorch import ops
from transformer_engine.pytorch.quantization import emulate

CALLS = 4  # a pass is compiled in the second call with a given signature
DTYPE = torch.bfloat16
SIZE = 64


def chains() -> dict[str, list[Any]]:
    settings: dict[str, Any] = {
        "dtype": DTYPE,
        "device": "cuda" if torch.cuda.is_available() else "cpu",
    }
    return {
        "norm_linear": [ops.RMSNorm(SIZE, **settings), ops.Linear(SIZE, SIZE, **settings)],
        "mlp": [
            ops.LayerNorm(SIZE, **settings),
            ops.Linear(SIZE, 2 * SIZE, **settings),
            ops.SwiGLU(),
            ops.Linear(SIZE, SIZE, bias=False, **settings),
        ],
        "gelu": [ops.Linear(SIZE, SIZE, **settings), ops.GELU()],
    }


def digest(tensors: list[Any]) -> str:
    result = hashlib.sha256()
    for tensor in tensors:
        if tensor is not None:
            result.update(tensor.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return result.hexdigest()[:16]


def train(
    module: torch.nn.Module, x: torch.Tensor, call: Callable[[], Any], recipe: Recipe | None
) -> str:
    """Digest of outputs and gradients over several steps, between which the parameters change."""
    records: list[Any] = []
    for _ in range(CALLS):
        x.grad = None
        module.zero_grad()
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = call()
        y.float().square().mean().backward()
        records += [y, x.grad, *[parameter.grad for parameter in module.parameters()]]
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
    with torch.no_grad(), te.autocast(enabled=recipe is not None, recipe=recipe):
        records.append(call())
    return digest(records)


def results() -> Iterator[tuple[str, str]]:
    for kind, recipe in RECIPES.items():
        for name in NAMES:
            layer = make_layer(name).to(DTYPE)
            x, call = make_call(layer, DTYPE)
            yield f"{name}/{kind}", train(layer, x, call, recipe)
        for name, operations in chains().items():
            torch.manual_seed(0)
            chain = ops.Sequential(*operations)
            for parameter in chain.parameters():
                torch.nn.init.normal_(parameter, std=0.3)
            x = torch.randn(SIZE, SIZE).to(parameter.device, DTYPE).requires_grad_()
            yield f"{name}/{kind}", train(chain, x, lambda chain=chain, x=x: chain(x), recipe)


if __name__ == "__main__":
    with emulate():
        print(json.dumps(dict(results())))
