"""Milliseconds for a mixture of experts, forward and backward, and the share outside its grouped products.

    python benchmarks/expert_step.py [--json FILE] [--only TEXT]

The layer is as in `te train --experts 8` (router in float32, permutation with padding, two GroupedLinear, SwiGLU,
unpermutation, the loss that balances experts), by recipe. Products are the two GroupedLinear by themselves, forward and
backward, quantization included, on as many rows for each expert as the layer's router sent. Kernel times come
from the profiler. Loop times are wall times per call: the host waits for the router's counts once per call. A recipe
that this GPU does not support is a row with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from record import GPU, kernel_durations, options, parser, select_cases, write

import transformer_engine.pytorch as te
from transformer_engine.pytorch.module.row_groups import alignment
from transformer_engine.pytorch.quantization import check_recipe_support, family_named
from transformer_engine_tools.bench.measure import measure
from transformer_engine_tools.demo.config import RECIPES, RunConfig
from transformer_engine_tools.demo.experts import CHOSEN, MixtureOfExperts
from transformer_engine_tools.demo.model import parameter_dtype

# Hidden and tokens: the demonstration's large preset, and two larger models'.
SIZES = ((768, 16384), (2048, 8192), (4096, 16384))
EXPERTS = 8


class Step(NamedTuple):
    """A recipe and a size."""

    name: str
    recipe: str
    hidden: int
    tokens: int

    def made(self) -> Any:
        """The recipe; None computes in bfloat16."""
        return None if self.recipe == "none" else family_named(self.recipe).recipe()

    def under(self) -> AbstractContextManager[Any]:
        result = self.made()
        return te.autocast(enabled=result is not None, recipe=result)

    def unsupported_reason(self) -> str | None:
        """Reason why this machine does not support the recipe, or None."""
        supported, reason = (
            (True, "") if self.recipe == "none" else check_recipe_support(self.made())
        )
        return None if supported else reason


def main() -> None:
    chosen = options(parser(__doc__))
    steps = [
        Step(f"{name}_h{hidden}_t{tokens}", name, hidden, tokens)
        for hidden, tokens in SIZES
        for name in RECIPES
    ]
    rows = []
    for step in select_cases(steps, chosen.only):
        unsupported = step.unsupported_reason()
        figures = measure_step(step) if unsupported is None else {"skipped": unsupported}
        rows.append({"case": step.name, **figures})
        print(*(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    write(chosen.json, rows=rows)


def measure_step(step: Step) -> dict[str, float]:
    """Milliseconds for the layer and for its products, and the share that is not products."""
    config = RunConfig(
        step.recipe, "cuda", 1, 1, 32, 1, step.hidden, step.hidden // 64, 1e-3, experts=EXPERTS
    )
    layer = MixtureOfExperts(config, 0.02)
    x = torch.randn(step.tokens, step.hidden, device=GPU, dtype=parameter_dtype(config))
    run = train_step(step, layer, x)
    with step.under():
        counts = -(-layer._route(layer.norm(x))[1].sum(0) // alignment()) * alignment()
        splits = counts.tolist()
    rows = sum(splits)
    first = torch.randn(rows, step.hidden, device=GPU, dtype=x.dtype)
    second = torch.randn(rows, layer.fc2.in_features, device=GPU, dtype=x.dtype)
    products = [
        train_step(step, lambda x, fc=fc: fc(x, splits), argument)
        for fc, argument in ((layer.fc1, first), (layer.fc2, second))
    ]
    loop, products_loop = (
        measure(run, GPU).eager_ms,
        sum(measure(call, GPU).eager_ms for call in products),
    )
    kernels, products_kernels = kernel_ms(run), sum(map(kernel_ms, products))
    return {
        "kernels_ms": round(kernels, 3),
        "products_kernels_ms": round(products_kernels, 3),
        "share_outside": round(1 - products_kernels / kernels, 3),
        "loop_ms": round(loop, 3),
        "products_loop_ms": round(products_loop, 3),
        "rows_a_token": round(rows / step.tokens / CHOSEN, 3),
    }


def kernel_ms(call: Callable[[], object], runs: int = 10) -> float:
    """Kernel milliseconds per call, averaged over several calls."""
    call()
    return sum(map(sum, kernel_durations(call, runs).values())) / 1e3 / runs


def train_step(
    step: Step, module: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
) -> Callable[[], object]:
    """A forward and backward pass through the module under the step's recipe."""
    leaf = x.detach().requires_grad_()
    gradient: list[torch.Tensor] = []

    def run() -> None:
        with step.under():
            y = module(leaf)
        if not gradient:
            gradient.append(torch.randn_like(y))
        y.backward(gradient[0])

    return run


if __name__ == "__main__":
    main()
