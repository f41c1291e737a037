"""The cost of te.observe: wall milliseconds for a step without it, an observed step, and the average step.

    python benchmarks/observe.py [--json FILE] [--only TEXT] [--small]

A step is forward, backward and SGD for a TransformerLayer with Llama 8B's extents on 8192 tokens (--small: a
LayerNormMLP with width 256 on 256 tokens, for a machine without a GPU). The average is for te.observe's default,
which observes one step in ten. An observed step includes putting the quantizers in place and taking them away.
"""

from __future__ import annotations

import torch
from llama_layers import BF16, MODELS, TOKENS
from record import parser, write

import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes
from transformer_engine_tools.bench.measure import measure

EVERY = 10
RECIPES: dict[str, recipes.Recipe] = {
    "delayed": recipes.DelayedScaling(),
    "current": recipes.Float8CurrentScaling(),
    "block": recipes.Float8BlockScaling(),
}


def layer(device: torch.device, small: bool) -> tuple[torch.nn.Module, torch.Tensor]:
    """The layer and its input [tokens, 1, hidden]."""
    if small:
        return te.LayerNormMLP(256, 512, device=device), torch.randn(256, 1, 256, device=device)
    model = MODELS["layer llama8b"]
    return model.make(device.type), torch.randn(TOKENS, 1, model.inputs, dtype=BF16, device=device)


def milliseconds(
    recipe: recipes.Recipe, device: torch.device, small: bool, observes: bool
) -> float:
    """Milliseconds per step in a loop; either all steps are observed or none."""
    torch.manual_seed(0)
    module, x = layer(device, small)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    observation = te.observe(module, every=1) if observes else None

    def step() -> None:
        with te.autocast(recipe=recipe):
            loss = module(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if observation is not None:
            observation.step()

    return measure(step, device).eager_ms


def main() -> None:
    arguments = parser(__doc__, "run the recipes whose name contains this")
    arguments.add_argument("--small", action="store_true", help="a small layer")
    chosen = arguments.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = []
    print(f"{'recipe':10} {'plain':>9} {'observed':>9} {'average':>9}  ms a step, {'more':>7}")
    for name, recipe in RECIPES.items():
        if chosen.only not in name:
            continue
        plain, observed = (
            milliseconds(recipe, device, chosen.small, observes) for observes in (False, True)
        )
        average = plain + (observed - plain) / EVERY
        rows.append(
            {"recipe": name, "plain_ms": plain, "observed_ms": observed, "average_ms": average}
        )
        print(
            f"{name:10} {plain:9.3f} {observed:9.3f} {average:9.3f}  {average / plain - 1:18.2%}",
            flush=True,
        )
    write(chosen.json, cases=rows)


if __name__ == "__main__":
    main()
