"""Reports as a table, a picture, and scalars of TensorBoard, by libraries that need not be there."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...common import optional
from .observation_report import COLUMNS, StepReport, TensorReport, sentence

_WITHOUT_NUMBERS = 2  # columns of text
_PANELS: tuple[tuple[str, str, Callable[[Sequence[TensorReport]], float | None]], ...] = (
    ("worst SQNR [dB]", "linear", lambda tensors: _worst_sqnr(tensors)),
    ("most underflow", "linear", lambda tensors: max(t.underflow for t in tensors)),
    ("most saturation", "linear", lambda tensors: max(t.saturation for t in tensors)),
)


def demand(library: str, purpose: str, remedy: str) -> None:
    """ValueError, with what to do, where a library for a purpose is missing or broken."""
    reason = None if optional.installed(library) else f"{library} is not installed"
    reason = reason or optional.failure(library)
    if reason is not None:
        raise ValueError(f"{purpose} needs {library}: {reason}; {remedy}")


def table(report: StepReport) -> Any:
    """A table of `rich`: every quantized tensor, and every other one with a value that is not finite."""
    demand("rich", "a table", "pip install rich, or print the report itself")
    from rich.table import Table

    made = Table(title=f"step {report.step}", caption=sentence(report), box=None, padding=(0, 1, 0, 0))
    shown = len(COLUMNS) if report.first_nonfinite else len(COLUMNS) - 1
    for place, heading in enumerate(COLUMNS[:shown]):
        justify = "left" if place < _WITHOUT_NUMBERS else "right"
        made.add_column(heading, justify=justify, overflow="fold", no_wrap=place > 0)
    for tensor in report.tensors:
        if tensor.format is not None or tensor.nonfinite:
            made.add_row(*tensor.cells()[:shown], style="red" if tensor.nonfinite else None)
    return made


def plot(reports: Sequence[StepReport], path: Path) -> None:
    """Three panels over the steps: the worst of each kind of tensor."""
    demand("matplotlib", "a plot", "pip install matplotlib")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    kinds = sorted({_kind(tensor) for report in reports for tensor in report.quantized})
    for place, (title, scale, worst) in enumerate(_PANELS, start=1):
        axes = figure.add_subplot(1, len(_PANELS), place)
        for kind in kinds:
            points = [
                (report.step, worst(_of_kind(report, kind))) for report in reports if _of_kind(report, kind)
            ]
            shown = [(step, value) for step, value in points if value is not None]
            axes.plot([step for step, _ in shown], [value for _, value in shown], marker=".", label=kind)
        axes.set(title=title, xlabel="step", yscale=scale)
        axes.grid(alpha=0.3)
        if kinds and place == 1:
            axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def board(folder: str | Path | None) -> Any:
    """A writer of TensorBoard into a folder; None for none."""
    if folder is None:
        return None
    demand("tensorboard", "tensorboard=", "pip install tensorboard, or read the log of JSON lines")
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder))


def write_scalars(writer: Any, report: StepReport) -> None:
    """The numbers of a report under the names of their tensors."""
    for tensor in report.tensors:
        writer.add_scalar(f"maximum/{tensor.name}", tensor.maximum, report.step)
        if tensor.format is not None:
            writer.add_scalar(f"underflow/{tensor.name}", tensor.underflow, report.step)
            writer.add_scalar(f"saturation/{tensor.name}", tensor.saturation, report.step)
        if tensor.sqnr is not None and math.isfinite(tensor.sqnr):
            writer.add_scalar(f"sqnr/{tensor.name}", tensor.sqnr, report.step)
    writer.add_scalar("nonfinite", sum(tensor.nonfinite for tensor in report.tensors), report.step)


def _kind(tensor: TensorReport) -> str:
    return tensor.tensor.rpartition(".")[2]


def _of_kind(report: StepReport, kind: str) -> list[TensorReport]:
    return [tensor for tensor in report.quantized if _kind(tensor) == kind]


def _worst_sqnr(tensors: Sequence[TensorReport]) -> float | None:
    finite = [t.sqnr for t in tensors if t.sqnr is not None and math.isfinite(t.sqnr)]
    return min(finite, default=None)
