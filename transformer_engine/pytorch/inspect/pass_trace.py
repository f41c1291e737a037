"""Statement trace for a layer's passes, for `explain(.., steps=True)`.

The passes are plain functions. While one runs, Python's trace function reports each statement that assigns a
tensor or an operand, with the backends that the statement asked for. Nothing is traced outside a report.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from torch import Tensor

from ...common.explanation import PassReport, PassStepReport
from ..functions import (
    gathered_operands,
    grouped_linear,
    linear,
    linear_results,
    norm_linear,
    norm_mlp,
)
from ..ops.passes import (
    activation,
    bias,
    collectives,
    elementwise,
    extra_tensors,
    grouped,
    normalization,
)
from ..primitives.operand import Operand
from ..tensor.quantized_tensor import QuantizedTensorStorage
from ..tensor.quantizer import TransposedValues

# The modules whose functions are passes and their parts.
PASSES = (
    linear,
    linear_results,
    gathered_operands,
    norm_linear,
    norm_mlp,
    grouped_linear,
    activation,
    bias,
    collectives,
    elementwise,
    extra_tensors,
    grouped,
    normalization,
)
_FILES = frozenset([module.__file__ for module in PASSES])


def form(value: Any) -> str:
    """Dtype or format, and shape, of a buffer."""
    if isinstance(value, TransposedValues):
        value = value.values
    if isinstance(value, Operand):
        name = (
            str(value.codes.dtype).removeprefix("torch.")
            if value.format is None
            else value.format.name
        )
        return f"{name} {[value.rows, value.depth]}"
    if isinstance(value, tuple):  # codes and scales that a kernel has quantized
        return ", ".join([form(buffer) for buffer in _buffers(value)])
    if isinstance(value, list):
        forms = list(dict.fromkeys([form(member) for member in value]))
        return f"{len(value)} groups: " + ", ".join(forms[:3] + ["..."] * (len(forms) > 3))
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type(value).__name__


@functools.cache
def _statements(file: str) -> dict[int, str]:
    """{line: text} for the statements in a file, by every line in a statement."""
    with open(file, encoding="utf-8") as opened:
        source = opened.read()
    statements: dict[int, str] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Return)):
            text = " ".join((ast.get_source_segment(source, node) or "").split())
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                statements[line] = text.replace("( ", "(").replace(" )", ")")
    return statements


def _buffers(value: Any) -> list[Any]:
    """The tensors and operands of a value; matrices by the values that they hold."""
    if isinstance(value, (list, tuple)) and not isinstance(value, (Operand, TransposedValues)):
        return [buffer for member in value for buffer in _buffers(member)]
    if isinstance(value, TransposedValues):
        return [value.values]
    return [value] if isinstance(value, (Tensor, Operand, QuantizedTensorStorage)) else []


@dataclass(eq=False)
class PassTrace:
    """Collects the passes that run while `run` is a `functions.layer` runner.

    Attributes:
        reports: The passes in the order in which they ran.
        asked: Backends that the running statement has asked for.
    """

    reports: list[PassReport] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def run(
        self, name: str, function: Callable[..., Any], arguments: tuple[Any, ...], count: int | None
    ) -> Any:
        """Run a pass and report its statements.

        Args:
            name: Pass name in the report.
            function: The pass.
            arguments: Its arguments.
            count: Number of results, after which the function returns the saved values; None for a backward pass.
        """
        steps: list[PassStepReport] = []
        # Buffers by identity, which are reported once. They are kept alive, so that no identity is used twice.
        known: dict[int, tuple[str, Any]] = {
            id(buffer): ("", buffer) for buffer in _buffers(arguments)
        }
        previous_trace = sys.gettrace()
        self.asked.clear()
        sys.settrace(functools.partial(self._entered, steps, known))
        try:
            results = function(*arguments)
        finally:
            sys.settrace(previous_trace)
        saved: tuple[str, ...] = ()
        if count is not None:
            buffers = _buffers(results[count:])
            saved = tuple([f"{known.get(id(b), ('', 0))[0]} {form(b)}".strip() for b in buffers])
        self.reports.append(PassReport(name, tuple(steps), saved))
        return results

    def _entered(
        self,
        steps: list[PassStepReport],
        buffers: dict[int, tuple[str, Any]],
        frame: FrameType,
        event: str,
        _: Any,
    ) -> Callable[..., Any] | None:
        if frame.f_code.co_filename not in _FILES:
            return None
        for name, value in frame.f_locals.items():
            for buffer in _buffers(value):
                if not buffers.get(id(buffer), ("",))[0]:
                    buffers[id(buffer)] = (name, buffer)
        running: list[str] = []  # the statement that runs

        def line(frame: FrameType, event: str, _: Any) -> Any:
            text = _statements(frame.f_code.co_filename).get(frame.f_lineno, "")
            if event == "line" and running and text == running[-1]:
                return line
            results: list[str] = []
            for name, value in frame.f_locals.items():
                fresh = [buffer for buffer in _buffers(value) if id(buffer) not in buffers]
                buffers.update({id(buffer): (name, buffer) for buffer in fresh})
                if fresh:
                    results.append(f"{name} {form(value)}")
            if results and running:
                steps.append(PassStepReport(running[-1], tuple(results), tuple(self.asked)))
                self.asked.clear()
            running[:] = [text]
            return line

        return line
