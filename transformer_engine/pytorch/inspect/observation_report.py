"""Reports on observed steps: one row per tensor and the first non-finite value, as text, table, plot and scalars.

The libraries `rich`, `matplotlib` and `tensorboard` are optional.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...common import optional

COLUMNS = ("tensor", "format", "maximum", "underflow", "saturation", "SQNR", "not finite")


@dataclass(frozen=True)
class TensorReport:
    """Statistics of one module tensor in one step, over all its matrices.

    Attributes:
        module: Module name.
        tensor: "input", "weight", "output", "grad_output" or "grad_input" for a product; "forward":
            the module output, "backward": its gradient.
        format: Code format; None: high precision.
        elements: Element count.
        maximum: max|x| over the finite values.
        underflow: Fraction of elements that are not 0 and became 0.
        saturation: Fraction of elements that became the largest code although they are half a step
            or more beyond it.
        sqnr: 10 log10(sum x^2 / sum (x - q)^2) in dB; inf without an error; None if nothing was quantized.
        nonfinite: Number of elements that are NaN or infinite.
    """

    module: str
    tensor: str
    format: str | None
    elements: int
    maximum: float
    underflow: float
    saturation: float
    sqnr: float | None
    nonfinite: int

    @property
    def name(self) -> str:
        return f"{self.module}.{self.tensor}" if self.module else self.tensor

    def cells(self) -> tuple[str, ...]:
        """Return the cells of a table row, in COLUMNS order."""
        return (
            self.name,
            self.format or "",
            f"{self.maximum:.3g}",
            "" if self.format is None else f"{self.underflow:.2%}",
            "" if self.format is None else f"{self.saturation:.2%}",
            "" if self.sqnr is None else f"{self.sqnr:.1f} dB",
            str(self.nonfinite) if self.nonfinite else "",
        )


@dataclass(frozen=True)
class StepReport:
    """The tensors of a step in the order in which they were first seen."""

    step: int
    tensors: tuple[TensorReport, ...]

    @property
    def first_nonfinite(self) -> TensorReport | None:
        """The first tensor with a NaN or an infinity; if it is a "forward", its module produced the first one."""
        return next((tensor for tensor in self.tensors if tensor.nonfinite), None)

    @property
    def quantized(self) -> tuple[TensorReport, ...]:
        """The quantized tensors."""
        return tuple(tensor for tensor in self.tensors if tensor.format is not None)

    def as_json(self) -> str:
        """Return one JSON line, with null for non-finite numbers."""
        first = self.first_nonfinite
        tensors = [
            {
                key: None if isinstance(value, float) and not math.isfinite(value) else value
                for key, value in asdict(tensor).items()
            }
            for tensor in self.tensors
        ]
        content = {
            "step": self.step,
            "first_nonfinite": None if first is None else first.name,
            "tensors": tensors,
        }
        return json.dumps(content, allow_nan=False) + "\n"

    def __str__(self) -> str:
        lines = aligned([COLUMNS, *(tensor.cells() for tensor in self.tensors)])
        return "\n".join([f"step {self.step}", *lines, sentence(self)])


def sentence(report: StepReport) -> str:
    """Return a sentence on the first non-finite value."""
    first = report.first_nonfinite
    if first is None:
        return "all values are finite"
    where = f"{first.nonfinite:,} of {first.elements:,} elements"
    if first.tensor == "forward":
        return f"{first.module or 'the model'} made the first NaN or infinity of step {report.step}: {where}"
    return f"the first NaN or infinity of step {report.step} is in {first.name}: {where}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align cell rows as text lines."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def demand(library: str, purpose: str, remedy: str) -> None:
    """Raise ValueError with a remedy if a library is missing or broken."""
    reason = None if optional.installed(library) else f"{library} is not installed"
    reason = reason or optional.failure(library)
    if reason is not None:
        raise ValueError(f"{purpose} needs {library}: {reason}; {remedy}")


def table(report: StepReport) -> Any:
    """Build a `rich` table with all quantized tensors and all tensors with a non-finite value."""
    demand("rich", "a table", "pip install rich, or print the report itself")
    from rich.table import Table

    result = Table(
        title=f"step {report.step}", caption=sentence(report), box=None, padding=(0, 1, 0, 0)
    )
    columns = len(COLUMNS) if report.first_nonfinite else len(COLUMNS) - 1
    for index, heading in enumerate(COLUMNS[:columns]):
        justify = "left" if index < _TEXT_COLUMNS else "right"
        result.add_column(heading, justify=justify, overflow="fold", no_wrap=index > 0)
    for tensor in report.tensors:
        if tensor.format is not None or tensor.nonfinite:
            result.add_row(*tensor.cells()[:columns], style="red" if tensor.nonfinite else None)
    return result


_TEXT_COLUMNS = 2
_Worst = Callable[[Sequence[TensorReport]], float | None]
_PANELS: tuple[tuple[str, _Worst], ...] = (
    (
        "worst SQNR [dB]",
        lambda tensors: min(
            (t.sqnr for t in tensors if t.sqnr is not None and math.isfinite(t.sqnr)), default=None
        ),
    ),
    ("most underflow", lambda tensors: max(t.underflow for t in tensors)),
    ("most saturation", lambda tensors: max(t.saturation for t in tensors)),
)


def plot(reports: Sequence[StepReport], path: Path) -> None:
    """Plot the worst value per tensor kind over the steps, in three panels."""
    demand("matplotlib", "a plot", "pip install matplotlib")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    kinds = sorted({_kind(tensor) for report in reports for tensor in report.quantized})
    for index, (title, worst) in enumerate(_PANELS, start=1):
        axes = figure.add_subplot(1, len(_PANELS), index)
        for kind in kinds:
            of_kind = [
                (report.step, [t for t in report.quantized if _kind(t) == kind])
                for report in reports
            ]
            points = [(step, worst(tensors)) for step, tensors in of_kind if tensors]
            visible = [(step, value) for step, value in points if value is not None]
            axes.plot(
                [step for step, _ in visible],
                [value for _, value in visible],
                marker=".",
                label=kind,
            )
        axes.set(title=title, xlabel="step")
        axes.grid(alpha=0.3)
        if kinds and index == 1:
            axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def board(folder: str | Path | None) -> Any:
    """Return a TensorBoard writer for a folder, or None."""
    if folder is None:
        return None
    demand("tensorboard", "tensorboard=", "pip install tensorboard, or read the log of JSON lines")
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder))


def _kind(tensor: TensorReport) -> str:
    return tensor.tensor.rpartition(".")[2]
