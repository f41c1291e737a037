"""Reports: a table a family on the terminal, and one JSON file with the machine, the command and every row."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..machine import machine
from .roofs import Roofs
from .run import Row

MEANING = (
    "gpu_ms: GPU time, launches queued ahead and L2 evicted; cpu_ms: host time to queue one call; eager_ms: wall "
    "time of a call in a loop; rate: over gpu_ms (eager_ms on a CPU); roof: part of the measured roof; "
    "peak_mib: additional memory of one call; of programs that JAX compiles also compile_s, cached_s from "
    "JAX's cache on disk, and fp8_calls: their products of FP8 operands in cuBLASLt; there gpu_ms is kernel time by "
    "the profiler, peak_mib XLA's plan"
)

HEADINGS = (
    "GPU ms",
    "host ms",
    "wall ms",
    "x torch",
    "rate",
    "of roof",
    "peak MiB",
    "compile s",
    "cached s",
    "FP8 calls",
)


def families(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Group the rows by family, in order of first appearance."""
    grouped: dict[str, list[Row]] = {}
    for row in rows:
        grouped.setdefault(row.family, []).append(row)
    return grouped


def print_rows(console: Console, rows: Sequence[Row]) -> None:
    """Print one table per family; `of roof` is the rate relative to the measured roof of the machine.

    Columns that no family row fills, such as GPU time on a CPU, are left out.

    `x torch` is the wall time of plain PyTorch on the same sizes over the row's: above 1 the row is faster.
    """
    plain = {
        row.case.replace(f"/{row.recipe}/", "/"): row.eager_ms
        for row in rows
        if row.provider == "torch" and row.eager_ms
    }
    for family, members in families(rows).items():
        console.print(_table(family, members, plain))


def _table(family: str, rows: Sequence[Row], plain: dict[str, float]) -> Table:
    figures = [_figures(row, plain) for row in rows]
    filled = [heading for heading in HEADINGS if any(cells[heading] for cells in figures)]
    table = Table(title=family, title_justify="left")
    table.add_column("case", overflow="fold")
    table.add_column("by")
    for heading in filled:
        table.add_column(heading, justify="right")
    failed = any(row.error for row in rows)
    if failed:
        table.add_column("error", overflow="fold")
    for row, cells in zip(rows, figures, strict=True):
        name = row.case.partition("/")[2] if row.case.startswith(f"{family}/") else row.case
        error = [escape(row.error or "")] if failed else []
        table.add_row(name, row.provider, *(cells[heading] for heading in filled), *error)
    return table


def _figures(row: Row, plain: dict[str, float]) -> dict[str, str]:
    """Format the cells of a row by heading, empty for missing figures."""
    case = row.case.replace(f"/{row.recipe}/", "/")
    speedup = plain[case] / row.eager_ms if case in plain and row.eager_ms else None
    cells = (
        _figure(row.gpu_ms, 3),
        _figure(row.cpu_ms, 3),
        _figure(row.eager_ms, 3),
        _figure(speedup, 2),
        "" if row.rate is None else f"{_format_significant(row.rate)} {row.unit}",
        "" if row.roof is None else f"{100 * row.roof:.0f} %",
        _figure(row.peak_mib, 0),
        _figure(row.compile_s, 1),
        _figure(row.cached_s, 1),
        _figure(row.fp8_calls, 0),
    )
    return dict(zip(HEADINGS, cells, strict=True))


def _format_significant(value: float) -> str:
    """Format a number with three significant digits, or without decimals from 100 on."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _figure(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def print_roofs(console: Console, roofs: Roofs) -> None:
    fp8 = (
        "not measured" if roofs.fp8 is None else f"{_format_significant(roofs.fp8 / 1e12)} TFLOP/s"
    )
    console.print(
        f"roofs   copy {roofs.copy / 1e9:.0f} GB/s, bfloat16 product {_format_significant(roofs.bf16 / 1e12)} TFLOP/s, "
        f"FP8 product {fp8}",
        soft_wrap=True,
    )


def as_dict(rows: Iterable[Row], roofs: Roofs, missing: dict[str, str]) -> dict[str, Any]:
    """JSON file content: machine, torch, command, xla_flags, meaning, roofs, missing and results."""
    described = machine()
    return {
        "machine": described.device,
        "package": described.version,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "libraries": described.libraries,
        "command": " ".join(["te", *sys.argv[1:]]),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "meaning": MEANING,
        "roofs": {
            "copy_gb_s": round(roofs.copy / 1e9, 2),
            "bf16_tflop_s": round(roofs.bf16 / 1e12, 4),
            "fp8_tflop_s": None if roofs.fp8 is None else round(roofs.fp8 / 1e12, 2),
        },
        "missing": missing,
        "results": [row.as_dict() for row in rows],
    }


def write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
