"""MiB that forward + backward of the fused layers take at their peak: planned by te.memory_plan, and measured on a GPU.

    python benchmarks/peak_memory.py [--json FILE] [--only TEXT]

A figure is the peak above what is allocated before the call: parameters, input, output's gradient, and the gradients of
the call before, which go when the call begins. Without a GPU the plan alone is printed, for products in steps of their
own.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

import transformer_engine.pytorch as te
from transformer_engine import __version__
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch.attention import RotaryPositionEmbedding

MIB = 2**20
DTYPE = torch.bfloat16
TOKENS, HIDDEN, INNER, HEADS, GROUPS, HEAD = 8192, 4096, 14336, 32, 8, 128
RECIPES: dict[str, recipes.Recipe | None] = {
    "bf16": None,
    "delayed": recipes.DelayedScaling(),
    "current": recipes.Float8CurrentScaling(),
    "block": recipes.Float8BlockScaling(),
}


class Case(NamedTuple):
    """How to make a model on a device, and the features of its input and output."""

    make: Callable[[str], nn.Module]
    inputs: int
    outputs: int


def _linear(inputs: int, outputs: int) -> Case:
    return Case(
        lambda device: te.Linear(inputs, outputs, bias=False, params_dtype=DTYPE, device=device),
        inputs,
        outputs,
    )


def _layernorm_linear(device: str) -> nn.Module:
    width = (HEADS + 2 * GROUPS) * HEAD
    return te.LayerNormLinear(
        HIDDEN, width, bias=False, normalization="RMSNorm", params_dtype=DTYPE, device=device
    )


def _mlp(activation: str) -> Case:
    def make(device: str) -> nn.Module:
        gated = activation == "swiglu"
        normalization = "RMSNorm" if gated else "LayerNorm"
        return te.LayerNormMLP(
            HIDDEN,
            INNER,
            bias=not gated,
            activation=activation,
            normalization=normalization,
            params_dtype=DTYPE,
            device=device,
        )

    return Case(make, HIDDEN, HIDDEN)


def _layer(device: str) -> nn.Module:
    return te.TransformerLayer(
        HIDDEN,
        INNER,
        HEADS,
        num_gqa_groups=GROUPS,
        bias=False,
        activation="swiglu",
        normalization="RMSNorm",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        fuse_qkv_params=True,
        params_dtype=DTYPE,
        self_attn_mask_type="causal",
        device=device,
    )


CASES = {
    "linear 4096x28672": _linear(HIDDEN, 2 * INNER),
    "linear 14336x4096": _linear(INNER, HIDDEN),
    "layernorm_linear rms 4096x6144": Case(_layernorm_linear, HIDDEN, (HEADS + 2 * GROUPS) * HEAD),
    "layernorm_mlp swiglu 4096x14336": _mlp("swiglu"),
    "layernorm_mlp gelu 4096x14336": _mlp("gelu"),
    "layer llama8b": Case(_layer, HIDDEN, HIDDEN),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--only", default="", help="run the cases whose recipe and name contain this")
    chosen = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    rows = []
    print(f"{'case':42} {'planned':>9} {'measured':>9} {'forward alone':>14}  MiB, {TOKENS} tokens")
    for recipe_name, recipe in RECIPES.items():
        for name, case in CASES.items():
            label = f"{recipe_name} {name}"
            if chosen.only not in label:
                continue
            row = {"case": label, "planned_mib": planned(case, recipe)}
            if has_gpu:
                row["measured_mib"], row["forward_mib"] = measured(case, recipe)
            rows.append(row)
            figures = [
                f"{row[key]:9.2f}" if key in row else f"{'-':>9}" for key in ("planned_mib", "measured_mib")
            ]
            forward = f"{row['forward_mib']:14.2f}" if has_gpu else f"{'-':>14}"
            print(f"{label:42} {figures[0]} {figures[1]} {forward}", flush=True)
    if chosen.json:
        machine = torch.cuda.get_device_name() if has_gpu else "none"
        about = {"gpu": machine, "transformer_engine": __version__, "torch": torch.__version__}
        with open(chosen.json, "w") as file:
            json.dump({"machine": about, "command": " ".join(sys.argv), "cases": rows}, file, indent=1)


def planned(case: Case, recipe: recipes.Recipe | None) -> float:
    """The plan's peak without what is there before the call."""
    model = case.make("meta")
    x = torch.empty(TOKENS, 1, case.inputs, dtype=DTYPE, device="meta")
    keywords = _keywords(model, "meta")
    plan = te.memory_plan(model, recipe, TOKENS, inputs=(x,), **keywords)  # pyright: ignore[reportArgumentType]
    gradients = sum(parameter.nbytes for parameter in model.parameters()) + x.nbytes
    given = (
        x.nbytes + TOKENS * case.outputs * DTYPE.itemsize + sum(angles.nbytes for angles in keywords.values())
    )
    return (plan.peak - plan.workspace - plan.parameters - given - gradients) / MIB


def measured(case: Case, recipe: recipes.Recipe | None) -> tuple[float, float]:
    """Forward + backward, and the forward pass where no gradients are recorded."""
    torch.manual_seed(0)
    model = case.make("cuda")
    x = torch.randn(TOKENS, 1, case.inputs, dtype=DTYPE, device="cuda", requires_grad=True)
    dy = torch.randn(TOKENS, 1, case.outputs, dtype=DTYPE, device="cuda")
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
    """MiB that a warm call takes above what is allocated before it."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / MIB


if __name__ == "__main__":
    main()
