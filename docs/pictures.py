"""Write the pictures of docs/images/ that show records of benchmarks/results/.

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
from performance_table import HIGHLIGHTS, RECIPES

from transformer_engine_tools.bench.plot import COLOURS, DOTS_PER_INCH, LABELS, WIDTH, plot_families
from transformer_engine_tools.bench.run import Row

IMAGES = ROOT / "docs" / "images"
RESULTS = ROOT / "benchmarks" / "results"


def rows_of(record: dict[str, Any]) -> list[Row]:
    """Rows of a record of `te bench`."""
    names = {field.name for field in fields(Row)}
    return [Row(**{name: row[name] for name in names & set(row)}) for row in record["results"]]


def headline(path: Path, record: dict[str, Any]) -> None:
    """One panel per highlighted case: GPU time of plain PyTorch and of this package, per recipe."""
    times = {(row["case"], row["provider"]): row["gpu_ms"] for row in record["results"]}
    figure = Figure(figsize=(WIDTH, 4.4), dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    for axis, (case, title) in zip(figure.subplots(len(HIGHLIGHTS), 1), HIGHLIGHTS.items(), strict=True):
        family, _, size = case.split("/")
        bars = {"plain torch, bfloat16": times[f"{family}/bf16/{size}", "torch"]}
        bars["te, bfloat16"] = times[f"{family}/bf16/{size}", "te"]
        bars |= {
            f"te, {label}": times[f"{family}/{recipe}/{size}", "te"] for recipe, label in RECIPES.items()
        }
        colors = [COLOURS["torch"], *[COLOURS["te"]] * (len(bars) - 1)]
        drawn = axis.barh(range(len(bars)), list(bars.values()), color=colors)
        axis.bar_label(drawn, labels=[f"{value:.1f}" for value in bars.values()], padding=2, fontsize=LABELS)
        axis.set_yticks(range(len(bars)), list(bars), fontsize=LABELS)
        axis.set_title(title, fontsize=LABELS + 1)
        axis.invert_yaxis()
        axis.grid(axis="x", alpha=0.25)
        axis.set_axisbelow(True)
        axis.margins(x=0.1)
    axis.set_xlabel(f"GPU time of forward and backward pass, 8192 tokens, {record['machine']} (ms)")
    figure.savefig(path)


def main() -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import jax_goals

    record = json.loads((RESULTS / "bench_h200.json").read_text())
    headline(IMAGES / "headline-h200.png", record)
    layers = [row for row in rows_of(record) if row.family == "layer"]
    (written,) = plot_families(IMAGES, layers, record["machine"])
    written.rename(IMAGES / "layer-h200.png")
    in_jax = json.loads((RESULTS / "jax_h200.json").read_text())
    title = f"transformer_engine.jax, {in_jax['machine']}"
    jax_goals.plot(IMAGES / "jax-goals-h200.png", list(jax_goals.goals(in_jax)), title)


if __name__ == "__main__":
    main()
