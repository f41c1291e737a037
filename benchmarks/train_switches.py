"""Tokens per second, loss and peak memory for the demonstration training, alone and with each `te train` switch.

    python benchmarks/train_switches.py [--json FILE] [--only TEXT] [--recipe NAME] [--steps N] [--deterministic]
        [--small] [--by-recipe]

Every row trains a model from the same weights on the same batches, one after another; `experts` is another model, of as
much work a token. Tokens a second are those of the median ten steps, the first twenty left out; the loss is the mean of
the last twenty steps, in nats per byte. With --deterministic, graphs and offloading leave every bit of it; without, the
order of sums on a GPU changes it by itself, as `plain, again` shows. --small is for a machine without a GPU, where
nothing moves and no graph is made. --by-recipe trains the default model of `te train` (57 million parameters) under
every recipe that the machine supports instead, eagerly and in graphs.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from record import parser, select_cases, write

import transformer_engine.pytorch as te
from transformer_engine_tools.demo.config import (
    HIGH_PRECISION,
    RECIPES,
    Execution,
    RunConfig,
    learning_rate,
    resolve,
)
from transformer_engine_tools.demo.data import Corpus, load_corpus
from transformer_engine_tools.demo.run import Run

SIZES = {
    "cuda": {"steps": 200, "batch": 8, "sequence": 1024, "layers": 6, "hidden": 1024, "heads": 16},
    "cpu": {"steps": 40, "batch": 2, "sequence": 32, "layers": 3, "hidden": 128, "heads": 2},
}
CHUNK = 10  # steps between two readings of the device, as `te train` does it
LEFT_OUT = 2  # chunks in which kernels are compiled and graphs captured
EAGER = Execution(graphs=False)
LAST = 20  # steps whose mean loss is reported


@dataclass(frozen=True)
class Variant:
    """Options for `te train` apart from the recipe; high precision needs no recipe, too."""

    name: str
    execution: Execution = field(default_factory=Execution)
    options: dict[str, Any] = field(default_factory=dict)
    recipe: str | None = None


def recipe_variants() -> list[Variant]:
    """Each recipe eagerly and in graphs."""
    return [
        Variant(f"{recipe}{', graphs' if graphs else ''}", Execution(graphs=graphs), recipe=recipe)
        for recipe in (HIGH_PRECISION, "delayed", "current", "block")
        for graphs in (False, True)
    ]


def variants(layers: int) -> list[Variant]:
    return [
        Variant(HIGH_PRECISION, EAGER),
        Variant("plain", EAGER),
        Variant("plain, again", EAGER),
        Variant("optimizer fused_adam", EAGER, {"optimizer": "fused_adam"}),
        Variant("graphs", Execution(graphs=True)),
        Variant("graphs, fused_adam", Execution(graphs=True), {"optimizer": "fused_adam"}),
        Variant(f"offload-layers {layers - 2}", Execution(offload_layers=layers - 2)),
        Variant("observe", Execution(observe=True)),
        Variant("experts 8", options={"experts": 8}),
        Variant("experts 8, fused_adam", options={"experts": 8, "optimizer": "fused_adam"}),
    ]


def main() -> None:
    arguments = parser(__doc__, "run the variants whose name contains this")
    arguments.add_argument("--recipe", choices=RECIPES, default="delayed")
    arguments.add_argument("--steps", type=int)
    arguments.add_argument("--data", help="text to train on, as for te train")
    arguments.add_argument(
        "--deterministic", action="store_true", help="equal bits from run to run"
    )
    arguments.add_argument("--small", action="store_true", help="a small model")
    arguments.add_argument(
        "--by-recipe", action="store_true", help="the default model under every recipe"
    )
    chosen = arguments.parse_args()
    device = "cuda" if torch.cuda.is_available() and not chosen.small else "cpu"
    sizes = {**SIZES[device], "recipe": chosen.recipe, "data": chosen.data}
    if chosen.steps is not None:
        sizes["steps"] = chosen.steps
    corpus = load_corpus(chosen.data, sizes["sequence"])
    print(
        f"{'variant':24} {'tokens/s':>10} {'of plain':>9} {'loss':>8} {'validation':>10} {'peak MiB':>9}"
    )
    rows: list[dict[str, Any]] = []
    base = HIGH_PRECISION if chosen.by_recipe else "plain"
    if chosen.by_recipe and device == "cuda":
        sizes = {key: sizes[key] for key in ("steps", "recipe", "data")}
        corpus = load_corpus(chosen.data, resolve(device, sizes).sequence)
    chosen_variants = recipe_variants() if chosen.by_recipe else variants(sizes["layers"])
    for variant in select_cases(chosen_variants, chosen.only):
        config = resolve(device, {**sizes, **variant.options})
        with te.deterministic() if chosen.deterministic else nullcontext():
            rows.append({"variant": variant.name, **train_variant(variant, config, corpus)})
        plain = next((row["tokens_s"] for row in rows if row["variant"] == base), None)
        print(_line(rows[-1], plain), flush=True)
    write(chosen.json, config={**sizes, "device": device}, rows=rows)


def train_variant(variant: Variant, config: RunConfig, corpus: Corpus) -> dict[str, Any]:
    """Train a variant to its end, then validate; one row."""
    gc.collect()
    if config.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    variant.execution.check(config)
    recipe = variant.recipe or config.recipe
    run = Run(
        HIGH_PRECISION if variant.name == HIGH_PRECISION else recipe, config, variant.execution
    )
    with tempfile.TemporaryDirectory() as folder:
        if variant.execution.observe:
            run.observe(Path(folder) / "observed.jsonl")
        losses, seconds = _steps(run, config, corpus)
        validation = run.evaluate(corpus.validation_batches(8, config.batch, config.sequence))
        if run.observation is not None:
            run.observation.close()
    return {
        "tokens_s": round(
            config.tokens_per_step / statistics.median(seconds[LEFT_OUT:] or seconds)
        ),
        "loss": round(statistics.mean(losses[-LAST:]), 4),
        "validation_loss": round(validation, 4),
        "parameters": run.parameters,
        "peak_mib": round(torch.cuda.max_memory_allocated() / 2**20)
        if config.device == "cuda"
        else None,
    }


def _steps(run: Run, config: RunConfig, corpus: Corpus) -> tuple[list[float], list[float]]:
    """(loss per step, seconds per step by chunk)"""
    losses: list[float] = []
    seconds: list[float] = []
    for first in range(0, config.steps, CHUNK):
        steps = range(first, min(first + CHUNK, config.steps))
        batches = [corpus.batch(config.seed, step, config.batch, config.sequence) for step in steps]
        rates = [learning_rate(step, config.steps, config.learning_rate) for step in steps]
        start = time.perf_counter()
        losses += run.train(batches, rates, first)
        seconds.append((time.perf_counter() - start) / len(steps))
    return losses, seconds


def _line(row: dict[str, Any], plain: float | None) -> str:
    ratio = "" if plain is None else f"{row['tokens_s'] / plain:.3f}"
    peak = "" if row["peak_mib"] is None else f"{row['peak_mib']:,}"
    return (
        f"{row['variant']:24} {row['tokens_s']:10,} {ratio:>9} {row['loss']:8.4f} {row['validation_loss']:10.4f} "
        f"{peak:>9}"
    )


if __name__ == "__main__":
    main()
