"""GroupedLinear against torch's grouped product: GPU milliseconds for forward and backward, in turns.

    python benchmarks/grouped_linear.py [--json FILE] [--only TEXT] [--runs 20] [--kernels] [--arms NAMES]

Cases are 64 experts of 2048 x 1408 and 128 experts of 2048 x 1536 with 32768 tokens, as many for each expert. Every arm
is the layer's forward and backward pass, with the L2 cache flushed. "cast" quantizes the weights in each call, "cached"
passes is_first_microbatch=False after a call that cached them. Ratios are to the fastest bfloat16 arm. --kernels adds
a table of each arm's kernels: microseconds per pass, averaged over the passes of a profile.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from record import GPU, kernel_durations, options, parser, select_cases, write

import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes
from transformer_engine_tools.bench.measure import measure_in_turns

BF16 = torch.bfloat16
RECIPES = {
    "delayed": recipes.DelayedScaling,
    "current": recipes.Float8CurrentScaling,
    "block": recipes.Float8BlockScaling,
}


class Case(NamedTuple):
    """Experts with a weight [outputs, inputs] each, and the tokens of all together."""

    experts: int
    tokens: int
    inputs: int
    outputs: int

    @property
    def name(self) -> str:
        return f"{self.experts} experts, {self.tokens} tokens, {self.inputs} x {self.outputs}"


CASES = (Case(64, 32768, 2048, 1408), Case(128, 32768, 2048, 1536))


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument(
        "--runs", type=int, default=20, help="turns; each figure is their median"
    )
    arguments.add_argument(
        "--kernels", action="store_true", help="profile the kernels of each arm as well"
    )
    arguments.add_argument(
        "--arms", default="", help="arms whose name contains one of these, separated by commas"
    )
    chosen = options(arguments)
    rows = []
    kernels: list[dict[str, Any]] = []
    for case in select_cases(CASES, chosen.only):
        arms = {
            name: arm
            for name, arm in make_arms(case).items()
            if any(part in name for part in chosen.arms.split(","))
        }
        times = dict(zip(arms, measure_in_turns(list(arms.values()), chosen.runs), strict=True))
        best = min(milliseconds for name, milliseconds in times.items() if "bfloat16" in name)
        for name, milliseconds in times.items():
            row = {"case": case.name, "by": name, "ms": round(milliseconds, 4)}
            rows.append(row | {"of the best bfloat16": round(milliseconds / best, 3)})
            print(*rows[-1].values(), flush=True)
        if chosen.kernels:
            for name, arm in arms.items():
                table = profile_kernels(arm)
                kernels.append({"case": case.name, "by": name, "kernels": table})
                print(case.name, name, json.dumps(table), sep="\n", flush=True)
    figures: dict[str, Any] = {"rows": rows} | ({"kernels": kernels} if kernels else {})
    write(chosen.json, None, **figures)


def profile_kernels(arm: Callable[[], None], passes: int = 5) -> list[dict[str, Any]]:
    """Count and microseconds per pass of each kernel, the largest sum first."""
    arm()
    durations = kernel_durations(arm, passes)
    return [
        {
            "kernel": name[:100],
            "count": len(samples) / passes,
            "us": round(sum(samples) / passes, 1),
            "each": [round(sample, 1) for sample in samples[: len(samples) // passes]],
        }
        for name, samples in sorted(durations.items(), key=lambda item: -sum(item[1]))
    ]


def make_arms(case: Case) -> dict[str, Callable[[], None]]:
    """A forward and backward pass per arm."""
    x = torch.randn(case.tokens, case.inputs, device=GPU, dtype=BF16, requires_grad=True)
    gradient = torch.randn(case.tokens, case.outputs, device=GPU, dtype=BF16)
    stacked = torch.randn(case.experts, case.outputs, case.inputs, device=GPU, dtype=BF16).mul_(
        0.02
    )
    stacked.requires_grad_()
    per_expert = case.tokens // case.experts
    ends = torch.arange(1, case.experts + 1, device=GPU, dtype=torch.int32) * per_expert
    splits = [per_expert] * case.experts

    def passes(
        weights: list[torch.Tensor], forward: Callable[[], torch.Tensor]
    ) -> Callable[[], None]:
        def run() -> None:
            for tensor in (x, *weights):
                tensor.grad = None
            forward().backward(gradient)

        return run

    def engine(recipe: recipes.Recipe | None, cached: bool) -> Callable[[], None]:
        layer = te.GroupedLinear(
            case.experts, case.inputs, case.outputs, bias=False, params_dtype=BF16, device="cuda"
        )

        def forward(first: bool | None = False if cached else None) -> torch.Tensor:
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                return layer(x, splits, is_first_microbatch=first)

        if cached:
            forward(True)
        return passes(list(layer.parameters()), forward)

    arms = {
        "torch grouped_mm, bfloat16": passes(
            [stacked], lambda: F.grouped_mm(x, stacked.transpose(-2, -1), offs=ends)
        ),
        "GroupedLinear, bfloat16": engine(None, False),
    }
    for name, recipe in RECIPES.items():
        arms[f"GroupedLinear, {name}, weights cast in each call"] = engine(recipe(), False)
        arms[f"GroupedLinear, {name}, weights cached"] = engine(recipe(), True)
    return arms


if __name__ == "__main__":
    main()
