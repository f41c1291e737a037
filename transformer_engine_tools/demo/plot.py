"""loss.png: both loss curves above, their relative difference below."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .config import HIGH_PRECISION, RunConfig
from .records import Progress

COLOURS = {HIGH_PRECISION: "#555555"}
RECIPE_COLOUR = "#c2410c"


def smooth(values: list[float]) -> list[float]:
    """Average each value over a surrounding window, about a thirtieth of the curve.

    The window is truncated at the steep start, but not at the end, where a few steps' noise would look like a trend.
    """
    reach = len(values) // 60
    last = len(values) - 2 * reach - 1
    starts = [min(index - reach, last) for index in range(len(values))]
    windows = [values[max(0, start) : start + 2 * reach + 1] for start in starts]
    return [sum(window) / len(window) for window in windows]


def plot_losses(path: Path, config: RunConfig, history: list[Progress]) -> None:
    """Draw history to path; one panel only when nothing was quantized."""
    compared = len(config.runs) == 2
    figure = Figure(figsize=(8, 6 if compared else 4), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(
        2 if compared else 1, 1, sharex=True, squeeze=False, height_ratios=[3, 1][: 1 + compared]
    )
    upper = panels[0][0]
    steps = [record.step for record in history]
    evaluated = [
        (record.step, record.validation) for record in history if record.validation is not None
    ]
    for name in reversed(config.runs):
        colour = COLOURS.get(name, RECIPE_COLOUR)
        losses = [record.loss[name] for record in history]
        upper.plot(steps, losses, color=colour, alpha=0.2, linewidth=0.8)
        style = "-" if name == HIGH_PRECISION else "--"
        upper.plot(
            steps,
            smooth(losses),
            style,
            color=colour,
            linewidth=1.6,
            label=f"{config.label(name)}, training",
        )
        points = [values[name] for _, values in evaluated]
        marker = "o" if name == HIGH_PRECISION else "x"
        upper.plot(
            [step for step, _ in evaluated],
            points,
            marker,
            color=colour,
            markersize=7,
            markerfacecolor="none",
            label=f"{config.label(name)}, validation",
        )
    upper.set_ylabel("loss (nats per byte)")
    upper.set_title(
        f"byte-level GPT, {config.layers} layers, hidden {config.hidden}, "
        f"{config.tokens_per_step} bytes per step, {config.device}"
    )
    upper.legend(frameon=False)
    upper.grid(alpha=0.25)
    if compared:
        _difference(panels[1][0], config, history)
    panels[-1][0].set_xlabel("step")
    figure.savefig(path)


def _difference(panel, config: RunConfig, history: list[Progress]) -> None:
    """Plot 100 * (recipe - high precision) / high precision, with the one-percent band."""
    name, base = config.runs
    ratio = [100 * (record.loss[name] / record.loss[base] - 1) for record in history]
    panel.axhspan(-1, 1, color="#16a34a", alpha=0.12, label="within 1 %")
    panel.axhline(0, color="#555555", linewidth=0.8)
    panel.plot(
        [record.step for record in history],
        smooth(ratio),
        color=RECIPE_COLOUR,
        linewidth=1.4,
        label="training",
    )
    points = [
        (record.step, 100 * (record.validation[name] / record.validation[base] - 1))
        for record in history
        if record.validation is not None
    ]
    panel.plot(
        *zip(*points, strict=True), "x", color=RECIPE_COLOUR, markersize=7, label="validation"
    )
    limit = max(1.5, 1.1 * max(abs(value) for _, value in points)) if points else 1.5
    panel.set_ylim(-limit, limit)
    panel.set_ylabel("difference (%)")
    panel.legend(frameon=False, ncols=3, fontsize="small")
    panel.grid(alpha=0.25)
