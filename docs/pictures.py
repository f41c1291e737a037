"""Write the pictures in docs/images/ that show records from benchmarks/results/.

python docs/pictures.py
"""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from generated import ROOT
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from performance_table import ARMS, HIGHLIGHTS, RECIPES, SIZES

from transformer_engine_tools.bench.plot import COLOURS, DOTS_PER_INCH, LABELS, WIDTH, plot_families
from transformer_engine_tools.bench.run import Row

IMAGES = ROOT / "docs" / "images"
RESULTS = ROOT / "benchmarks" / "results"


def record_rows(record: dict[str, Any]) -> list[Row]:
    """Rows in a `te bench` record."""
    names = {field.name for field in fields(Row)}
    return [Row(**{name: row[name] for name in names & set(row)}) for row in record["results"]]


def headline(path: Path, record: dict[str, Any]) -> None:
    """One panel per highlighted case: GPU time in plain PyTorch and in this package, per recipe."""
    times = {(row["case"], row["provider"]): row["gpu_ms"] for row in record["results"]}
    figure = Figure(figsize=(WIDTH, 4.4), dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    for axis, (case, title) in zip(
        figure.subplots(len(HIGHLIGHTS), 1), HIGHLIGHTS.items(), strict=True
    ):
        family, _, size = case.split("/")
        bars = {"plain torch, bfloat16": times[f"{family}/bf16/{size}", "torch"]}
        bars["te, bfloat16"] = times[f"{family}/bf16/{size}", "te"]
        bars |= {
            f"te, {label}": times[f"{family}/{recipe}/{size}", "te"]
            for recipe, label in RECIPES.items()
        }
        colors = [COLOURS["torch"], *[COLOURS["te"]] * (len(bars) - 1)]
        drawn = axis.barh(range(len(bars)), list(bars.values()), color=colors)
        axis.bar_label(
            drawn, labels=[f"{value:.1f}" for value in bars.values()], padding=2, fontsize=LABELS
        )
        axis.set_yticks(range(len(bars)), list(bars), fontsize=LABELS)
        axis.set_title(title, fontsize=LABELS + 1)
        axis.invert_yaxis()
        axis.grid(axis="x", alpha=0.25)
        axis.set_axisbelow(True)
        axis.margins(x=0.1)
    axis.set_xlabel(f"GPU time of forward and backward pass, 8192 tokens, {record['machine']} (ms)")
    figure.savefig(path)


# Arms from `benchmarks/models.py` in the whole-model picture, from top to bottom.
DRAWN = ("te:delayed", "te:current", "te:bf16", "pt:tensorwise", "pt:bf16", "liger:bf16")
DARK = {"text": "#e5e7eb", "grid": "#9ca3af", "te": "#fb923c", "pt": "#9ca3af", "liger": "#4ade80"}
LIGHT = {
    "text": "#111827",
    "grid": "#6b7280",
    "te": COLOURS["te"],
    "pt": COLOURS["torch"],
    "liger": COLOURS["liger"],
}


def models(path: Path, record: dict[str, Any], palette: dict[str, str]) -> None:
    """One panel per model size: tokens per second per arm, labelled with the peak memory, on a transparent ground."""
    rows = {(row["arm"], row["size"]): row for row in record["medians"]}
    figure = Figure(figsize=(WIDTH, 5.4), dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(SIZES), 1)
    for axis, (size, title) in zip(axes, SIZES.items(), strict=True):
        drawn = [rows[arm, size] for arm in DRAWN]
        rates = [row["tokens_per_second"] / 1e3 for row in drawn]
        bars = axis.barh(
            range(len(DRAWN)), rates, color=[palette[arm.split(":")[0]] for arm in DRAWN]
        )
        texts = [
            f"{rate:,.0f}k, {row['peak_gib']:.1f} GiB"
            for rate, row in zip(rates, drawn, strict=True)
        ]
        axis.bar_label(bars, labels=texts, padding=3, fontsize=LABELS, color=palette["text"])
        axis.set_yticks(
            range(len(DRAWN)), [ARMS[arm].replace("`", "") for arm in DRAWN], fontsize=LABELS
        )
        axis.set_title(
            f"{title.removesuffix(' tokens')} tokens per step",
            fontsize=LABELS + 1,
            color=palette["text"],
        )
        axis.invert_yaxis()
        axis.set_axisbelow(True)
        axis.grid(axis="x", alpha=0.25, color=palette["grid"])
        axis.margins(x=0.25)
        axis.tick_params(colors=palette["text"])
        axis.spines[:].set_color(palette["grid"])
    machine = record["machine"].split(",")[0]
    axes[-1].set_xlabel(
        f"thousand tokens/s of a training step, and peak memory, {machine}", color=palette["text"]
    )
    figure.savefig(path, transparent=True)


def main() -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import jax_goals

    record = json.loads((RESULTS / "bench_h200.json").read_text())
    headline(IMAGES / "headline-h200.png", record)
    of_models = json.loads((RESULTS / "models_h200.json").read_text())
    models(IMAGES / "models-h200.png", of_models, LIGHT)
    models(IMAGES / "models-h200-dark.png", of_models, DARK)
    layers = [row for row in record_rows(record) if row.family == "layer"]
    (written,) = plot_families(IMAGES, layers, record["machine"])
    written.rename(IMAGES / "layer-h200.png")
    in_jax = json.loads((RESULTS / "jax_h200.json").read_text())
    title = f"transformer_engine.jax, {in_jax['machine']}"
    jax_goals.plot(IMAGES / "jax-goals-h200.png", list(jax_goals.goals(in_jax)), title)


if __name__ == "__main__":
    main()
