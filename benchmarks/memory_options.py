"""Planned and measured peak memory for a model's layers, for each option that saves smaller activations.

    python benchmarks/memory_options.py [--json FILE] [--only TEXT] [--size NAME ...] [--recipe NAME ...]

A row is a warm forward and backward pass of the layers of a size of `model_arms.py`, parameters, gradients and input
included, without head and optimizer: the peak, and the tensors that the forward pass saves. All options but one have
equal outputs and gradients, which is checked. Without a GPU, `--size tiny` prints the plans.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from model_arms import SIZES, EngineModel
from record import parser, write
from torch import Tensor, nn

import transformer_engine.pytorch as te

DETERMINISTIC = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
GIB = 2**30
COLUMNS = ("mlp_columns", "weight_columns", "input_columns", "norm_columns")


class Case(NamedTuple):
    """A row's options: backends, and attributes for every LayerNormMLP."""

    name: str
    backends: dict[str, str] = {}
    settings: tuple[str, ...] = ()
    equal_bits: bool = True


CASES = (
    Case("all columns saved", dict.fromkeys(COLUMNS[:3], "saved")),
    Case("columns of weights and inputs saved", dict.fromkeys(COLUMNS[1:3], "saved")),
    Case("default"),
    Case("weights recomputed", {"weight_columns": "recomputed"}),
    Case(
        "weights and norms recomputed",
        {"weight_columns": "recomputed", "norm_columns": "recomputed"},
    ),
    Case(
        "the same, quantized activation inputs",
        {"weight_columns": "recomputed", "norm_columns": "recomputed"},
        ("cache_quantized_activation_input",),
        equal_bits=False,
    ),
    Case("checkpointed MLPs", {}, ("checkpoint",)),
)


class Layers(nn.Module):
    """Layers from an `EngineModel` without embedding, norm and head."""

    def __init__(self, model: EngineModel, settings: tuple[str, ...]) -> None:
        super().__init__()
        self.layers, self.angles = model.layers, model.angles
        for layer in self.layers:
            for name in settings:
                setattr(layer.layernorm_mlp, name, True)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, rotary_pos_emb=self.angles)
        return x


def rows(size: str, recipe: str, only: str) -> Iterator[dict[str, Any]]:
    """Rows for a size under a recipe."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    expected: list[Tensor] | None = None
    for case in CASES:
        if only not in case.name:
            continue
        torch.manual_seed(0)
        model = EngineModel(SIZES[size], recipe, device)
        layers = Layers(model, case.settings)
        active = model.recipe
        del model  # with its embedding and head
        shape = SIZES[size]
        x = torch.randn(
            shape.batch, shape.length, shape.hidden, dtype=torch.bfloat16, device=device
        )
        row: dict[str, Any] = {"size": size, "recipe": recipe, "options": case.name}
        with te.use_backend(**case.backends) if case.backends else nullcontext():
            plan = te.memory_plan(layers, active, 1, inputs=(x,))
            row |= {"planned_gib": plan.peak / GIB, "planned_saved_gib": plan.saved / GIB}
            if device == "cuda":
                measured, results = _measure(layers, x, active)
                row |= measured | {"ratio": round(plan.peak / GIB / measured["peak_gib"], 4)}
                if case.equal_bits:
                    expected = results if expected is None else expected
                    row["bits_equal"] = all(
                        torch.equal(a, b) for a, b in zip(results, expected, strict=True)
                    )
        del layers, x
        gc.collect()
        yield row


def _measure(layers: nn.Module, x: Tensor, recipe: Any) -> tuple[dict[str, float], list[Tensor]]:
    """Peak and saved GiB in the third step; output and gradients from a fourth, by deterministic kernels."""
    results: list[Tensor] = []
    figures: dict[str, float] = {}
    x.requires_grad_()
    allowed = os.environ.get(DETERMINISTIC, "1")
    for step in range(4):
        os.environ[DETERMINISTIC] = "0" if step == 3 else allowed  # needs more memory
        layers.zero_grad(set_to_none=True)
        x.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = layers(x)
        torch.cuda.synchronize()
        saved = torch.cuda.memory_allocated() - before - y.nbytes
        y.backward(torch.ones_like(y))
        torch.cuda.synchronize()
        if step == 2:
            figures = {
                "peak_gib": torch.cuda.max_memory_allocated() / GIB,
                "saved_gib": saved / GIB,
                "before_gib": before / GIB,
            }
        if step == 3:
            assert x.grad is not None
            gradients = [p.grad for p in layers.parameters() if p.grad is not None]
            results = [tensor.detach().cpu() for tensor in (y, x.grad, *gradients)]
        del y
    os.environ[DETERMINISTIC] = allowed
    return figures, results


def main() -> None:
    options = parser(__doc__, "options whose name contains this")
    options.add_argument("--size", nargs="+", choices=SIZES, default=["8Bx4", "1B"])
    options.add_argument("--recipe", nargs="+", default=["current", "delayed"])
    arguments = options.parse_args()
    found: list[dict[str, Any]] = []
    for size in arguments.size:
        for recipe in arguments.recipe:
            for row in rows(size, recipe, arguments.only):
                found.append(row)
                print(row, flush=True)
                write(arguments.json, results=found)


if __name__ == "__main__":
    main()
