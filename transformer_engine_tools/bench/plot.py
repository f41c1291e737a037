"""One picture per family: panels with one bar per case for times and the roof fraction, one color per provider.

The panels are below each other and eight inches wide, so that a text page shows the labels in its text size.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from .report import families
from .run import Row

COLOURS = {
    "te": "#c2410c",
    "torch": "#555555",
    "torch.compile": "#9ca3af",
    "torchao": "#1d4ed8",
    "liger": "#15803d",
    "quack": "#7e22ce",
    "jax": "#b45309",
    "xla": "#0e7490",
}
OTHER = "#000000"
WIDTH, DOTS_PER_INCH, LABELS = 8.0, 130, 9  # inches, dots, points
LOGARITHMIC_FROM = 20  # times the smallest bar, above which it would vanish on a linear axis


def plot_families(folder: Path, rows: Sequence[Row], device: str) -> list[Path]:
    """Write folder/FAMILY.png for every family that has figures; the paths written."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for family, members in families(row for row in rows if row.time_ms is not None).items():
        path = folder / f"{family}.png"
        _plot(path, family, members, device)
        written.append(path)
    return written


def _plot(path: Path, family: str, rows: Sequence[Row], device: str) -> None:
    """Plot the figures of one family, and write the image."""
    panels = ["time", "wall"] if rows[0].gpu_ms is not None else ["time"]
    if any(row.roof is not None for row in rows):
        panels.append("roof")
    height = 0.8 + len(panels) * (0.6 + 0.26 * len(rows))
    figure = Figure(figsize=(WIDTH, height), dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for panel, axis in zip(panels, axes, strict=True):
        clock = "GPU" if rows[0].gpu_ms is not None else "wall"
        label, values, text = {
            "time": (f"{clock} time (ms)", [row.time_ms for row in rows], "{:.3g}"),
            "wall": ("wall time in a loop (ms)", [row.eager_ms for row in rows], "{:.3g}"),
            "roof": ("part of the roof (%)", [100 * (row.roof or 0.0) for row in rows], "{:.0f}"),
        }[panel]
        bars = [value or 0.0 for value in values]
        container = axis.barh(
            range(len(rows)), bars, color=[COLOURS.get(row.provider, OTHER) for row in rows]
        )
        axis.bar_label(
            container, labels=[text.format(value) for value in bars], padding=2, fontsize=LABELS
        )
        axis.set_xlabel(label)
        axis.grid(axis="x", alpha=0.25)
        axis.set_axisbelow(True)
        axis.margins(x=0.15)
        positive = [value for value in bars if value > 0]
        if panel != "roof" and positive and max(positive) > LOGARITHMIC_FROM * min(positive):
            axis.set_xscale("log")
            axis.xaxis.set_minor_formatter(NullFormatter())
        axis.set_yticks(range(len(rows)), [row.case for row in rows], fontsize=LABELS)
        axis.invert_yaxis()
    providers = dict.fromkeys(row.provider for row in rows)
    handles = [axes[0].barh([0], [0], color=COLOURS.get(name, OTHER)) for name in providers]
    figure.legend(
        handles, list(providers), loc="outside lower center", ncols=len(providers), frameon=False
    )
    figure.suptitle(f"{family}, {device}")
    figure.savefig(path)
