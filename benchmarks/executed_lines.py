"""Count the Python code that layers execute on a CPU: `python benchmarks/executed_lines.py`.

For one warm forward and backward pass through a layer, the script counts the functions that run, their files, and
their logical lines of code. For a TransformerLayer's first call it counts Python function calls. Only this package's
functions count. A logical line is a statement, or the head of a compound one, however many lines it is formatted in.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import sys
import tokenize
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch.quantization import emulate

ROOT = str(Path(te.__file__).parents[1])
WARM = 3  # calls before the measured one


def trace_code(call: Callable[[], Any]) -> tuple[set[CodeType], int]:
    """Run a function; return this package's code objects that run, and their number of calls."""
    codes: set[CodeType] = set()
    calls = 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            codes.add(frame.f_code)
            calls += 1

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return codes, calls


def logical_lines(source: str) -> dict[int, int]:
    """{line: first line of its logical line}, for the lines with code."""
    first_lines: dict[int, int] = {}
    first: int | None = None
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT):
            continue
        if first is None:
            first = token.start[0]
        if token.type == tokenize.NEWLINE:
            first_lines.update(dict.fromkeys(range(first, token.start[0] + 1), first))
            first = None
    return first_lines


def lines_of_code(codes: set[CodeType]) -> dict[str, int]:
    """{file: logical lines in these functions}, without docstrings."""
    expected: dict[str, set[int]] = {}
    for code in codes:
        expected.setdefault(code.co_filename, set()).add(code.co_firstlineno)
    found: dict[str, int] = {}
    for file, first_lines in expected.items():
        if not Path(file).exists():  # generated code
            continue
        source = Path(file).read_text(encoding="utf-8")
        first_line_of = logical_lines(source)
        counted: set[int] = set()
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, (ast.FunctionDef, ast.Lambda)):
                continue
            decorators = getattr(node, "decorator_list", [])
            if not first_lines & {node.lineno, *[decorator.lineno for decorator in decorators]}:
                continue
            start = node.lineno
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
                documented = node.body[0]
                counted.update(range(start, documented.lineno))
                start = (documented.end_lineno or start) + 1
            counted.update(range(start, (node.end_lineno or start) + 1))
        statements = {first_line_of[line] for line in counted if line in first_line_of}
        found[file.removeprefix(ROOT + "/")] = len(statements)
    return found


def warm_pass(layer: torch.nn.Module, x: torch.Tensor, recipe: Any) -> dict[str, int]:
    """{file: lines} in a warm forward and backward pass under a recipe."""

    def step() -> None:
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = layer(x)
        y.backward(torch.ones_like(y))

    for _ in range(WARM):
        step()
    return lines_of_code(trace_code(step)[0])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", action="store_true", help="print the lines of each file")
    options = parser.parse_args()
    emulate()  # also on a machine with a GPU that lacks FP8
    bfloat16 = {"params_dtype": torch.bfloat16, "device": "cpu"}
    x = torch.randn(64, 64, dtype=torch.bfloat16, requires_grad=True)
    sequence = torch.randn(32, 2, 64, dtype=torch.bfloat16, requires_grad=True)
    transformer = te.TransformerLayer(
        64, 128, 4, hidden_dropout=0.0, attention_dropout=0.0, **bfloat16
    )
    recipe = recipes.Float8CurrentScaling()

    def first_call() -> None:
        with te.autocast(recipe=recipe):
            transformer(sequence)

    figures: dict[str, Any] = {"calls of TransformerLayer's first call": trace_code(first_call)[1]}
    for name, layer, argument in (
        ("Linear", te.Linear(64, 64, **bfloat16), x),
        ("LayerNormMLP", te.LayerNormMLP(64, 128, **bfloat16), x),
        ("TransformerLayer", transformer, sequence),
    ):
        files = warm_pass(layer, argument, recipe)
        figures[name] = {"files": len(files), "lines": sum(files.values())}
        if options.files:
            figures[name]["lines by file"] = dict(sorted(files.items(), key=lambda item: -item[1]))
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
