"""What an observed step shows: a line for each tensor, and where the first value that is not finite came up."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

COLUMNS = ("tensor", "format", "maximum", "underflow", "saturation", "SQNR", "not finite")


@dataclass(frozen=True)
class TensorReport:
    """One tensor of one module in one step, all its matrices together.

    tensor       input, weight, output, grad_output or grad_input of a product; "forward" and "backward": what the
                 module returned, and the gradient that came back for it
    format       of the codes; None: high precision
    maximum      max|x| of the finite values
    underflow    share of the elements that are not 0 and became 0
    saturation   share of the elements that lie half a step or more beyond the largest code, which they became
    sqnr         10 log10(sum x^2 / sum (x - q)^2) in dB, inf without an error; None where nothing was quantized
    nonfinite    number of elements that are NaN or infinite
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
        """What a table shows, in the order of COLUMNS."""
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
        """The first tensor with a NaN or an infinity. A module whose "forward" it is was the first that made one."""
        return next((tensor for tensor in self.tensors if tensor.nonfinite), None)

    @property
    def quantized(self) -> tuple[TensorReport, ...]:
        """Those that became codes."""
        return tuple(tensor for tensor in self.tensors if tensor.format is not None)

    def as_json(self) -> str:
        """One line; what is infinite is null, as JSON has it."""
        first = self.first_nonfinite
        tensors = [{key: _finite(value) for key, value in asdict(t).items()} for t in self.tensors]
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
    """Where the first value that is not finite came up, in words."""
    first = report.first_nonfinite
    if first is None:
        return "all values are finite"
    where = f"{first.nonfinite:,} of {first.elements:,} elements"
    if first.tensor == "forward":
        return f"{first.module or 'the model'} made the first NaN or infinity of step {report.step}: {where}"
    return f"the first NaN or infinity of step {report.step} is in {first.name}: {where}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines of text."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value
