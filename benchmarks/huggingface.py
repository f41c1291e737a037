"""Tokens/s and peak memory for training a random transformers Llama: stock, with te's attention, and converted.

    python benchmarks/huggingface.py [--json FILE] [--plot FILE] [--only TEXT] [--size 1b|tiny] [--length N]

A step is forward, loss, backward and torch's fused AdamW over 8192 tokens in bfloat16; the same weights, tokens and
optimizer for all. "stock" is transformers' own layers, eager, with torch's scaled_dot_product_attention. Tokens/s are
counted over wall time for steps in a loop. Memory is the peak allocation within a step, parameters and
optimizer states included. Every case builds, measures and frees its own model, in about ten seconds.
Needs transformers. Without a GPU, --size tiny shows that everything runs.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from record import machine, parser, select_cases, write
from torch import nn

import transformer_engine.pytorch as te
from transformer_engine.common import optional
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch.integrations.huggingface import inject_te_attention
from transformer_engine_tools.bench.measure import QUICK, Effort, measure, peak_mib

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EFFORT = Effort(warmup=4, budget_ms=1500.0, fewest=4, most=10)


class Size(NamedTuple):
    """Model shape and tokens per step."""

    settings: dict[str, Any]
    length: int
    tokens: int


SIZES = {
    "1b": Size(
        {
            "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True,
        },
        length=8192,
        tokens=8192,
    ),
    "tiny": Size(
        {
            "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
        },
        length=64,
        tokens=128,
    ),
}  # fmt: skip


class Case(NamedTuple):
    """How the stock model is converted."""

    name: str
    changed: Callable[[nn.Module], nn.Module]


CASES = (
    Case("stock", lambda model: model),
    Case("te attention", lambda model: inject_te_attention(model) or model),
    Case("converted", te.convert_hf),
    Case("converted, FP8 delayed", lambda model: te.convert_hf(model, recipes.DelayedScaling())),
    Case(
        "converted, FP8 current", lambda model: te.convert_hf(model, recipes.Float8CurrentScaling())
    ),
)


def main() -> None:
    result = parser(__doc__)
    result.add_argument("--plot", type=Path, help="draw the figures into this file")
    result.add_argument("--size", default="1b", choices=SIZES)
    result.add_argument(
        "--length", type=int, help="tokens of a sequence; the step's tokens stay the same"
    )
    chosen = result.parse_args()
    if not optional.installed("transformers"):
        raise SystemExit("these figures need models of transformers; pip install transformers")
    size = SIZES[chosen.size]
    length = chosen.length or size.length
    if length < 1 or size.tokens % length:
        result.error(f"--length {length} does not divide the {size.tokens} tokens of a step")
    rows = []
    print(f"{'':26} {'tokens/s':>10} {'ms':>9} {'of stock':>9} {'peak GiB':>9}   loss")
    for case in select_cases(CASES, chosen.only):
        row = measure_case(case, size, length)
        gc.collect()  # a model refers to itself
        rows.append(row)
        row["of_stock"] = row["tokens_per_second"] / rows[0]["tokens_per_second"]
        peak = "-" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}"
        print(
            f"{case.name:26} {row['tokens_per_second']:10.0f} {row['step_ms']:9.2f} {row['of_stock']:9.2f} {peak:>9}"
            f"   {row['loss']:.4f}",
            flush=True,
        )
    if chosen.plot is not None:
        plot(
            chosen.plot,
            rows,
            f"Llama {chosen.size}, {size.tokens} tokens in sequences of {length}, training",
        )
    write(
        chosen.json,
        machine(transformers=version("transformers")),
        size=chosen.size,
        length=length,
        tokens=size.tokens,
        settings=size.settings,
        cases=rows,
    )


def measure_case(case: Case, size: Size, length: int) -> dict[str, Any]:
    """Measure one case."""
    model = case.changed(stock(size, length))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    ids = torch.randint(size.settings["vocab_size"], (size.tokens // length, length), device=DEVICE)
    losses = []

    def step() -> None:
        loss = model(ids, labels=ids, use_cache=False).loss
        losses.append(loss.detach())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    timing = measure(step, DEVICE, EFFORT if DEVICE.type == "cuda" else QUICK)
    remote = torch.cuda.memory_allocated() / 2**20 if DEVICE.type == "cuda" else 0.0
    peak = peak_mib(step, DEVICE)
    return {
        "case": case.name,
        "tokens_per_second": 1e3 * size.tokens / timing.eager_ms,
        "step_ms": timing.eager_ms,
        "gpu_ms": timing.gpu_ms,
        "peak_gib": None if peak is None else (remote + peak) / 2**10,
        "loss": losses[0].item(),
    }


def stock(size: Size, length: int) -> nn.Module:
    """The seeded model in training mode, in bfloat16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        **size.settings, max_position_embeddings=length, attn_implementation="sdpa"
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with DEVICE:
            return LlamaForCausalLM(config).train()
    finally:
        torch.set_default_dtype(before)


def plot(path: Path, rows: list[dict[str, Any]], title: str) -> None:
    """Plot thousands of tokens/s, and memory on a GPU, with one bar per case."""
    panels = [("thousand tokens/s", [row["tokens_per_second"] / 1e3 for row in rows])]
    if rows[0]["peak_gib"] is not None:
        panels.append(("peak memory (GiB)", [row["peak_gib"] for row in rows]))
    figure = Figure(
        figsize=(4.8 * len(panels), 1.4 + 0.4 * len(rows)), dpi=130, layout="constrained"
    )
    FigureCanvasAgg(figure)
    for axis, (label, values) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
    ):
        colours = ["#c2410c" if row["case"].startswith("converted") else "#555555" for row in rows]
        bars = axis.barh([row["case"] for row in rows], values, color=colours)
        axis.bar_label(bars, fmt="%.1f", padding=2, fontsize=8)
        axis.invert_yaxis()
        axis.set_xlabel(label)
        axis.margins(x=0.15)
    figure.suptitle(title)
    figure.savefig(path)


if __name__ == "__main__":
    main()
