"""Peak MiB in forward + backward through the fused layers: planned by te.memory_plan, and measured on a GPU.

    python benchmarks/peak_memory.py [--json FILE] [--only TEXT]

A figure is the peak minus the memory allocated before the call: parameters, input, output's gradient, and gradients of
the previous call, which are freed when the call begins. Without a GPU only the plan is printed, with each product as a
separate step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from llama_layers import BF16, HEAD, MODELS, TOKENS, Model
from record import GPU, parser, write
from torch import nn

import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch.attention import RotaryPositionEmbedding
from transformer_engine_tools.bench.measure import peak_mib

MIB = 2**20
RECIPES: dict[str, recipes.Recipe | None] = {
    "bf16": None,
    "delayed": recipes.DelayedScaling(),
    "current": recipes.Float8CurrentScaling(),
    "block": recipes.Float8BlockScaling(),
}


def main() -> None:
    chosen = parser(__doc__, "run the cases whose recipe and name contain this").parse_args()
    has_gpu = torch.cuda.is_available()
    rows = []
    print(f"{'case':42} {'planned':>9} {'measured':>9} {'forward alone':>14}  MiB, {TOKENS} tokens")
    for recipe_name, recipe in RECIPES.items():
        for name, case in MODELS.items():
            label = f"{recipe_name} {name}"
            if chosen.only not in label:
                continue
            row = {"case": label, "planned_mib": plan_peak(case, recipe)}
            if has_gpu:
                row["measured_mib"], row["forward_mib"] = measure(case, recipe)
            rows.append(row)
            figures = [
                f"{row[key]:9.2f}" if key in row else f"{'-':>9}"
                for key in ("planned_mib", "measured_mib")
            ]
            forward = f"{row['forward_mib']:14.2f}" if has_gpu else f"{'-':>14}"
            print(f"{label:42} {figures[0]} {figures[1]} {forward}", flush=True)
    write(chosen.json, cases=rows)


def plan_peak(case: Model, recipe: recipes.Recipe | None) -> float:
    """The plan's peak minus the memory allocated before the call."""
    model = case.make("meta")
    x = torch.empty(TOKENS, 1, case.inputs, dtype=BF16, device="meta")
    keywords = _keywords(model, "meta")
    plan = te.memory_plan(model, recipe, TOKENS, inputs=(x,), **keywords)  # pyright: ignore[reportArgumentType]
    gradients = sum(parameter.nbytes for parameter in model.parameters()) + x.nbytes
    argument = (
        x.nbytes
        + TOKENS * case.outputs * BF16.itemsize
        + sum(angles.nbytes for angles in keywords.values())
    )
    return (plan.peak - plan.workspace - plan.parameters - argument - gradients) / MIB


def measure(case: Model, recipe: recipes.Recipe | None) -> tuple[float, float]:
    """Forward + backward, and the forward pass where no gradients are recorded."""
    torch.manual_seed(0)
    model = case.make("cuda")
    x = torch.randn(TOKENS, 1, case.inputs, dtype=BF16, device="cuda", requires_grad=True)
    dy = torch.randn(TOKENS, 1, case.outputs, dtype=BF16, device="cuda")
    keywords = _keywords(model, "cuda")

    def step() -> None:
        model.zero_grad(set_to_none=True)
        x.grad = None
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = model(x, **keywords)
        y.backward(dy)

    def forward() -> None:
        with torch.no_grad(), te.autocast(enabled=recipe is not None, recipe=recipe):
            model(x, **keywords)

    return _peak(step), _peak(forward)


def _keywords(model: nn.Module, device: str) -> dict[str, torch.Tensor]:
    if not isinstance(model, te.TransformerLayer):
        return {}
    if device == "meta":
        return {"rotary_pos_emb": torch.empty(TOKENS, 1, 1, HEAD, device="meta")}
    return {"rotary_pos_emb": RotaryPositionEmbedding(HEAD)(max_seq_len=TOKENS).to(device)}


def _peak(call: Callable[[], None]) -> float:
    """Peak MiB in a warm call above the memory allocated before it."""
    for _ in range(3):
        call()
    peak = peak_mib(call, GPU)
    assert peak is not None
    return peak


if __name__ == "__main__":
    main()
