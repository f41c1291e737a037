"""`verify` report: one row per tensor in a parallel run, with its error and the error that the format explains."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from .observation_report import aligned, demand

COLUMNS = ("module", "tensor", "rank", "error", "allowed", "gain", "allowed gain", "result")


@dataclass(frozen=True)
class TensorCheck:
    """Comparison of one tensor with the same tensor on one device in float32, on the rank that differs most.

    Args:
        module: Module name; "" is the model itself.
        tensor: Parameter, "output", "loss", "grad_output", "<parameter>.grad", "grad_input", or a scaling state.
        rank: Rank in the default process group.
        error: |x - reference| / |reference| in the Euclidean norm; inf for values that are not finite.
        allowance: Largest error that the format and the dtype explain.
        gain: x . reference / |reference|^2: 0.5 for a tensor that lacks a factor 2; None: not
            compared, because noise alone changes it.
        gain_allowance: Largest |gain - 1| that the format and the dtype explain.
        note: Finding other than a numerical difference.
    """

    module: str
    tensor: str
    rank: int
    error: float
    allowance: float
    gain: float | None = None
    gain_allowance: float = math.inf
    note: str = ""

    @property
    def excess(self) -> float:
        """Largest difference divided by its allowance; the tensor differs if it is above 1."""
        if self.note or not math.isfinite(self.error):
            return math.inf
        off = 0.0 if self.gain is None else abs(self.gain - 1) / self.gain_allowance
        return max(self.error / self.allowance if self.error else 0.0, off)

    @property
    def differs(self) -> bool:
        """Whether the difference is larger than the allowance."""
        return self.excess > 1

    @property
    def name(self) -> str:
        """Tensor name with its module."""
        return f"{self.module}.{self.tensor}" if self.module else self.tensor

    def cells(self) -> tuple[str, ...]:
        """Return the cells of a table row, in COLUMNS order."""
        return (
            self.module or "(model)",
            self.tensor,
            str(self.rank),
            f"{self.error:.2e}",
            f"{self.allowance:.2e}",
            "" if self.gain is None else f"{self.gain:.4f}",
            "" if self.gain is None else f"{self.gain_allowance:.4f}",
            (self.note or "differs") if self.differs else "equal",
        )


@dataclass(frozen=True)
class Verification:
    """Comparison of a parallel, quantized run with one device in float32; `str()` prints a table.

    Args:
        checks: One row per tensor in execution order: scaling states, parameters, outputs in
            forward order, loss, then gradients in backward order.
        ranks: Rank count.
        recipe: Recipe of the parallel run.
        loss: Mean over the ranks' losses.
        exact_loss: One device's loss in float32.
        not_compared: Tensors whose sharding is unknown, or that only one run has.
    """

    checks: tuple[TensorCheck, ...]
    ranks: int
    recipe: str
    loss: float
    exact_loss: float
    not_compared: tuple[str, ...] = ()

    @property
    def first(self) -> TensorCheck | None:
        """The first tensor that differs, in execution order; None if the runs agree."""
        return next((check for check in self.checks if check.differs), None)

    @property
    def equal(self) -> bool:
        """Whether every compared tensor is within its allowance."""
        return self.first is None

    @property
    def differing(self) -> tuple[TensorCheck, ...]:
        """All tensors that differ."""
        return tuple([check for check in self.checks if check.differs])

    def raise_if_different(self) -> None:
        """Raise an error that names the first tensor that differs.

        Raises:
            AssertionError: A tensor differs by more than its allowance.
        """
        if not self.equal:
            raise AssertionError(self.summary())

    def summary(self) -> str:
        """Return one sentence on the result."""
        first = self.first
        runs = f"{self.ranks} rank{'s' * (self.ranks > 1)} under {self.recipe}"
        if first is None:
            return f"{len(self.checks)} tensors of {runs} equal one device in float32 within the format's noise"
        finding = first.note or (
            f"error {first.error:.2e}, allowed {first.allowance:.2e}"
            if first.error > first.allowance or first.gain is None
            else f"gain {first.gain:.4f}, allowed 1 +- {first.gain_allowance:.4f}"
        )
        return (
            f"{first.module or 'the model'} is the first module that differs, on rank {first.rank}, in {first.tensor}: "
            f"{finding} ({len(self.differing)} of {len(self.checks)} tensors of {runs} differ)"
        )

    def __str__(self) -> str:
        lines = aligned([COLUMNS, *(check.cells() for check in self.checks)])
        lines.append(f"loss {self.loss:.6g}, on one device in float32 {self.exact_loss:.6g}")
        if self.not_compared:
            lines.append("not compared: " + ", ".join(self.not_compared))
        return "\n".join([*lines, self.summary()])

    def table(self) -> Any:
        """Return a `rich` table of all tensors, with differences in red."""
        demand("rich", "a table", "pip install rich, or print the verification itself")
        from rich.table import Table

        result = Table(box=None, padding=(0, 1, 0, 0))
        for index, heading in enumerate(COLUMNS):
            result.add_column(heading, justify="right" if 2 <= index < len(COLUMNS) - 1 else "left")
        for check in self.checks:
            result.add_row(*check.cells(), style="red" if check.differs else None)
        return result
